"""Ends a run early: by Ctrl-C, by a callback, or when the loop over its events is left."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any

__all__ = ["Interrupt", "StopRequest"]


class StopRequest:
    """A request to end a run: after the steps in flight, or at once (`abort`). For any thread."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_aborted = False

    @property
    def is_requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """End the run as after its last step; the first reason counts."""
        self.reason = self.reason if self.reason is not None else reason

    def abort(self) -> None:
        """End the run at once, without saving."""
        self.request("interrupted")
        self._is_aborted = True

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if the run is to end at once."""
        if self._is_aborted:
            raise KeyboardInterrupt


class Interrupt:
    """A context in which the first Ctrl-C only requests the run's end; the next one has its usual effect.

    Outside the main thread it does nothing.
    """

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _request(self, number: int, frame: object) -> None:
        self._stop.request("Ctrl-C")
        signal.signal(signal.SIGINT, self._before)
