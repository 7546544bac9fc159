"""Ctrl-C as a question: the first only asks to stop, the next one has its usual effect."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import Any

__all__ = ["Interrupt"]


class Interrupt:
    """A context; `asked` is set by the first Ctrl-C inside it. Elsewhere than in the main thread it never is."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
