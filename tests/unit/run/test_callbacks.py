"""Callbacks and streams without a training: what is delivered, in which order, and what a failure or a stop does."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ravnest
from ravnest.core.metrics import StageMetrics
from ravnest.events import (
    Callback,
    EndEvent,
    NodeLostEvent,
    StartEvent,
    StepEvent,
    StopTraining,
    TrainingEvent,
)
from ravnest.run.callback_thread import CallbackThread, EventQueue
from ravnest.run.stop import StopRequest
from ravnest.run.stream import EventStream

AT: dict[str, Any] = {"samples": 0, "seconds": 0.0}
END = EndEvent(step=9, outcome="finished", reason="", model=None, **AT)
LOST = NodeLostEvent(step=1, node="ann", reason="asleep", is_voluntary=False, is_connected=False, **AT)


def step(number: int) -> StepEvent:
    return StepEvent(
        step=number, loss=1.0, metrics={}, learning_rate=0.1, samples_per_s=1.0, staleness=0.0, cluster="c1",
        stages=(StageMetrics(),), **AT,
    )  # fmt: skip


def start(folder: Path) -> StartEvent:
    return StartEvent(step=0, folder=folder, name="x", is_resumed=False, config={}, optimizer={}, batch_size=1, **AT)


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[TrainingEvent] = []

    def on_event(self, event: TrainingEvent) -> None:
        self.events.append(event)


class Failing(Callback):
    calls = 0

    def on_step(self, event: StepEvent) -> None:
        self.calls += 1
        raise ZeroDivisionError("no numbers")


def test_every_kind_has_its_method() -> None:
    called: list[str] = []

    class Names(Callback):
        def on_step(self, event: StepEvent) -> None:
            called.append(f"step {event.step}")

        def on_node_lost(self, event: NodeLostEvent) -> None:
            called.append(f"lost {event.node}")

    for event in (step(1), LOST, END):  # END: no method is overridden
        Names().on_event(event)
    assert called == ["step 1", "lost ann"]


def test_a_callback_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    failing, other = Failing(), Recorder()
    stop = StopRequest()
    with caplog.at_level(logging.WARNING), CallbackThread([failing, other], stop) as thread:
        for number in (1, 2, 3):
            thread.put(step(number))
        thread.put(END)
    assert failing.calls == 1
    assert [event.step for event in other.events] == [1, 2, 3, 9]
    assert not stop.is_requested
    (record,) = caplog.records
    assert "callback Failing failed and is left out from now on: ZeroDivisionError: no numbers" in record.getMessage()
    assert "test_callbacks.py, line" in record.getMessage()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StopTraining("good enough"), "Stopping stopped the run: good enough"),
        (StopTraining(), "Stopping stopped the run"),
        (KeyboardInterrupt(), "Stopping stopped the run with KeyboardInterrupt"),
        (SystemExit(1), "Stopping stopped the run with SystemExit"),
    ],
    ids=str,
)
def test_a_callback_may_stop_the_run(error: BaseException, reason: str) -> None:
    class Stopping(Callback):
        ended = False

        def on_step(self, event: StepEvent) -> None:
            raise error

        def on_end(self, event: EndEvent) -> None:
            self.ended = True

    stop, callback = StopRequest(), Stopping()
    with CallbackThread([callback], stop) as thread:
        thread.put(step(1))
        thread.put(END)
    assert stop.reason == reason
    assert callback.ended, "it still gets the end"
    stop.check()  # it does not end at once


def test_training_does_not_wait_for_a_slow_callback(caplog: pytest.LogCaptureFixture) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    class Slow(Recorder):
        def on_event(self, event: TrainingEvent) -> None:
            begun.set()
            assert may_go_on.wait(60)
            super().on_event(event)

    slow = Slow()
    with caplog.at_level(logging.WARNING), CallbackThread([slow], StopRequest()) as thread:
        thread.put(step(0))
        assert begun.wait(60)
        for number in range(1, 10_003):
            thread.put(step(number))
        thread.put(LOST)
        thread.put(END)
        may_go_on.set()
    assert [event.step for event in slow.events[:-2]] == list(range(10_001)), "the queue holds 10,000"
    assert slow.events[-2:] == [LOST, END]
    behind, left_out = (record.getMessage() for record in caplog.records)
    assert "1000 events behind" in behind
    assert "2 steps were not delivered" in left_out


def test_ctrl_c_leaves_out_a_callback_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    class Hanging(Callback):
        def on_step(self, event: StepEvent) -> None:
            begun.set()
            may_go_on.wait(60)

    with caplog.at_level(logging.WARNING), CallbackThread([Hanging()], StopRequest()) as thread:
        for number in (1, 2, 3):
            thread.put(step(number))
        assert begun.wait(60)
        thread._thread.join = _interrupted  # type: ignore[method-assign]
    assert [record.getMessage() for record in caplog.records] == ["2 events were not delivered to callbacks"]
    may_go_on.set()


@pytest.mark.parametrize("wrong", [Recorder, print, "tensorboard"], ids=str)
def test_what_is_no_callback_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"objects of subclasses of ravnest.Callback, got"):
        CallbackThread([wrong], StopRequest())


def test_a_callback_without_a_list_is_refused() -> None:
    job = ravnest.Job(lambda: 1 / 0, None, [])  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="callbacks must be a list of callbacks, got <"):
        job.train(callbacks=Recorder())  # type: ignore[arg-type]


def test_a_full_queue_leaves_out_steps_alone() -> None:
    queue = EventQueue(max_events=2)
    for event in (step(1), step(2), step(3), LOST, END):
        queue.put(event)
    queue.close()
    events = [queue.get() for _ in range(5)]
    assert events == [step(1), step(2), LOST, END, None]
    assert queue.num_left_out == 1


# streams: `train` stands for a training, which ends when it is asked to


def endless(folder: Path, ended: list[str]) -> Callable[[Callback, StopRequest], Any]:
    def train(callback: Callback, stop: StopRequest) -> Any:
        callback.on_event(start(folder))
        number = 0
        while not stop.is_requested:
            number += 1
            callback.on_event(step(number))
            threading.Event().wait(0.001)
        stop.check()
        ended.append(stop.reason or "")
        return "the run"

    return train


def test_leaving_the_loop_ends_the_run(tmp_path: Path) -> None:
    ended: list[str] = []
    stream = EventStream(endless(tmp_path, ended))
    for event in stream:
        if event.step == 3:
            break
    gc.collect()
    assert ended == ["the loop over its events was left"]
    assert vars(stream)["_run"] == "the run"
    assert "run" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ValueError, match="can be read once"):
        iter(stream)


def test_an_error_in_the_loop_ends_the_run(tmp_path: Path) -> None:
    ended: list[str] = []

    def plot() -> None:
        for event in EventStream(endless(tmp_path, ended)):
            if event.step == 2:
                raise KeyError("no such axis")

    with pytest.raises(KeyError, match="no such axis"):
        plot()
    gc.collect()
    assert ended == ["the loop over its events was left"]


def test_a_closed_generator_and_a_context_end_the_run(tmp_path: Path) -> None:
    ended: list[str] = []
    events = iter(EventStream(endless(tmp_path, ended)))
    next(events)
    events.close()  # type: ignore[attr-defined]
    with EventStream(endless(tmp_path, ended)) as stream:
        events = iter(stream)
        next(events)
    assert len(ended) == 2
    assert stream.run == "the run"  # type: ignore[comparison-overlap]


def test_the_error_of_a_run_is_raised_after_its_events() -> None:
    def train(callback: Callback, stop: StopRequest) -> Any:
        callback.on_event(step(1))
        raise ValueError("the data end")

    stream = EventStream(train)
    seen: list[int] = []
    with pytest.raises(ValueError, match="the data end"):
        seen.extend(event.step for event in stream)
    assert seen == [1]
    with pytest.raises(ValueError, match="the data end"):
        _ = stream.run


def test_a_run_that_has_not_ended_has_no_result() -> None:
    stream = EventStream(lambda callback, stop: "the run")  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="has not ended"):
        _ = stream.run
    assert "not started" in stream._repr_html_()
    assert list(stream) == []
    assert stream.run == "the run"  # type: ignore[comparison-overlap]


def test_the_second_interrupt_does_not_wait() -> None:
    """`close` waits in the user's thread; an interrupt there ends the run without saving."""
    waiting, ended = threading.Event(), threading.Event()

    def train(callback: Callback, stop: StopRequest) -> Any:
        callback.on_event(step(1))
        waiting.wait(60)
        try:
            while True:
                stop.check()
                threading.Event().wait(0.001)
        finally:
            ended.set()

    stream = EventStream(train)
    events = iter(stream)
    next(events)
    assert stream._thread is not None
    stream._thread.join = _interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        events.close()  # type: ignore[attr-defined]
    waiting.set()
    assert ended.wait(60)


def _interrupted(timeout: float | None = None) -> None:
    raise KeyboardInterrupt
