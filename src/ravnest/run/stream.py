"""A training as an iterable of events: the run is in a thread of its own, and the loop over it in the user's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import torch

from ravnest.events import Callback, StartEvent, TrainingEvent
from ravnest.run.callback_thread import EventQueue
from ravnest.run.html import folder_html
from ravnest.run.result import Run
from ravnest.run.stop import StopRequest

__all__ = ["EventStream"]

_POLL_S = 1.0


class EventStream:
    """The events of a run, from `Job.stream`. Iterating it trains.

    The run trains in a thread of its own and does not wait for the loop. Leaving the loop, by `break`, `return` or an
    error, ends the run like Ctrl-C: it finishes the steps in flight, saves the model and ends its processes. A loop
    that is more than 10,000 events behind misses steps, and no other events.

    Ctrl-C in the loop does the same and then raises `KeyboardInterrupt`; a second Ctrl-C does not wait for the model.
    Displayed in a notebook, a stream shows the curves and the plan of its run so far.

    Example:
        stream = job.stream(steps=1000, on="local:4")
        for event in stream:
            if isinstance(event, ravnest.events.StepEvent) and event.loss < 0.1:
                break
        stream.run.state_dict()
    """

    def __init__(self, train: Callable[[Callback, StopRequest], Run]) -> None:
        """`train(callback, stop)` trains, and delivers all events to the callback."""
        self._train, self._stop, self._events = train, StopRequest(), EventQueue()
        self._is_read = False
        self._num_threads = torch.get_num_threads()  # a new thread has a number of its own
        self._thread: threading.Thread | None = None
        self._run: Run | None = None
        self._error: BaseException | None = None
        self._folder: Path | None = None

    def __iter__(self) -> Iterator[TrainingEvent]:
        """Train, and yield the events. Raises the error with which the run fails."""
        if self._is_read:
            raise ValueError("a stream can be read once: call job.stream again for another run")
        self._is_read = True
        return self._read()

    def _read(self) -> Iterator[TrainingEvent]:
        self._thread = threading.Thread(target=self._run_training, name="run", daemon=True)
        self._thread.start()
        is_complete = False
        try:
            while (event := self._next()) is not None:
                if isinstance(event, StartEvent):
                    self._folder = event.folder
                yield event
            is_complete = True
        finally:  # also when the loop is left
            self.close()
        if is_complete and self._error is not None:
            raise self._error

    def _next(self) -> TrainingEvent | None:
        while True:
            try:
                return self._events.get(_POLL_S)  # a wait without an end could not be interrupted on Windows
            except TimeoutError:
                continue

    def close(self) -> None:
        """End the run like Ctrl-C, if it is still going on, and wait until its model is saved."""
        if self._thread is None:
            return
        if self._thread.is_alive():
            self._stop.request("the loop over its events was left")
        try:
            while self._thread.is_alive():
                self._thread.join(_POLL_S)
        except KeyboardInterrupt:
            self._stop.abort()
            raise

    def __enter__(self) -> EventStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def run(self) -> Run:
        """The finished run. Raises the error with which the run failed, or `ValueError` if it has not ended."""
        if self._error is not None:
            raise self._error
        if self._run is None:
            raise ValueError("the run has not ended: read the stream to its end, or call its close()")
        return self._run

    def _run_training(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            self._run = self._train(_Forward(self._events), self._stop)
        except BaseException as error:  # raised in the user's thread
            self._error = error
        finally:
            self._events.close()

    def _repr_html_(self) -> str:
        if self._thread is None:
            return folder_html(None, "not started: iterate it to train")
        ended = "stopped" if self._stop.is_requested else "finished"
        state = "failed" if self._error is not None else "training" if self._run is None else ended
        return folder_html(self._folder, state)


class _Forward(Callback):
    """Puts all events into a queue."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events

    def on_event(self, event: TrainingEvent) -> None:
        self._events.put(event)
