"""Delivers the events of a run to the user's callbacks, in a thread of its own.

Training never waits for a callback. Events wait in a queue; when it is full, further steps are left out and counted,
and every other event is still delivered. At the end the thread delivers all events that wait.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType

from ravnest.events import Callback, StepEvent, StopTraining, TrainingEvent
from ravnest.run.stop import StopRequest

__all__ = ["CallbackThread", "EventQueue"]

_LOG = logging.getLogger("ravnest.callback")

_MAX_EVENTS = 10_000
_LAGGING_EVENTS = 1_000
_WAIT_S = 10.0  # between two messages about callbacks that have not ended


class EventQueue:
    """A queue of events between two threads. A full queue takes no further steps, and all other events."""

    def __init__(self, max_events: int = _MAX_EVENTS) -> None:
        self._max_events = max_events
        self._events: deque[TrainingEvent] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self.num_left_out = 0

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: TrainingEvent) -> None:
        """Append an event, unless the queue is full and it is a step."""
        with self._changed:
            if len(self._events) >= self._max_events and isinstance(event, StepEvent):
                self.num_left_out += 1
                return
            self._events.append(event)
            self._changed.notify()

    def close(self) -> None:
        """End the queue: `get` returns the events that wait, then None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def get(self, timeout_s: float | None = None) -> TrainingEvent | None:
        """Return the next event; None at the end. Raises `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._events or self._is_closed, timeout_s):
                raise TimeoutError
            return self._events.popleft() if self._events else None


class CallbackThread:
    """A context in which events are delivered (`put`); leaving it delivers all that wait."""

    def __init__(self, callbacks: Iterable[Callback], stop: StopRequest) -> None:
        self._callbacks, self._stop = list(callbacks), stop
        for callback in self._callbacks:
            if isinstance(callback, type) or not isinstance(callback, Callback):
                shown = f"the class {callback.__name__}" if isinstance(callback, type) else repr(callback)
                raise ValueError(f"callbacks must be objects of subclasses of ravnest.Callback, got {shown}")
        self._queue = EventQueue()
        self._is_lagging = False
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)

    def put(self, event: TrainingEvent) -> None:
        """Deliver an event soon. For any thread."""
        if not self._callbacks:
            return
        self._queue.put(event)
        if len(self._queue) > _LAGGING_EVENTS and not self._is_lagging:
            self._is_lagging = True
            _LOG.warning(
                "callbacks are %d events behind: training does not wait for them; more than %d are not kept",
                _LAGGING_EVENTS, _MAX_EVENTS,
            )  # fmt: skip

    def __enter__(self) -> CallbackThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.close()
        try:
            self._thread.join(_WAIT_S)
            while self._thread.is_alive():
                _LOG.warning("waiting for callbacks to handle %d events; Ctrl-C leaves them out", len(self._queue))
                self._thread.join(_WAIT_S)
        except KeyboardInterrupt:
            _LOG.warning("%d events were not delivered to callbacks", len(self._queue))
        if self._queue.num_left_out:
            _LOG.warning("%d steps were not delivered to callbacks, which were too slow", self._queue.num_left_out)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            for callback in list(self._callbacks):
                self._deliver(callback, event)

    def _deliver(self, callback: Callback, event: TrainingEvent) -> None:
        name = type(callback).__name__
        try:
            callback.on_event(event)
        except StopTraining as request:
            self._stop.request(f"{name} stopped the run" + (f": {request}" if str(request) else ""))
        except (KeyboardInterrupt, SystemExit) as request:
            self._stop.request(f"{name} stopped the run with {type(request).__name__}")
        except BaseException as error:  # of the user's code
            self._callbacks.remove(callback)
            _LOG.warning("callback %s failed and is left out from now on: %s", name, _in_one_line(error))


def _in_one_line(error: BaseException) -> str:
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
