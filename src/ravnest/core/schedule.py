"""Pipeline schedule: the order of a stage's forwards, backwards and optimizer steps, as a state machine.

It has neither clock nor I/O; worker, simulator and tests run the same one. There is no flush unless `delay` is 0, and
forwards and backwards alternate where both are possible. With A = `accumulate`, step s consists of the microbatches m
with m // A == s, and update s applies the gradient of step s to weights version s, giving version s + 1. Every
microbatch of step s runs, forward and backward, on version

    version(s) = max(0, s - delay)

whatever the timing, so the same seed gives the same weights. Its staleness is s - version(s) <= delay. Three settings:

    delay 0                          synchronous: flush after each step
    delay 1, accumulate >= depth     double-buffered: two live versions, no bubble (the default)
    delay d, accumulate 1            the paper's: a version per microbatch in flight, d = depth - 1 <= 2 (N - j)

A forward waits while `depth` microbatches are in flight at this stage, or while its version does not exist yet.

The reason to alternate: if all gradients of a burst go first, the next stage runs out of work, and its gradients come
back in a burst again, indefinitely. Over links with latency that costs up to a third of the throughput
(`ravnest.simulator`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from math import ceil
from typing import Literal, NamedTuple

from ravnest.core.config import config, require

__all__ = ["Action", "Kind", "PipelineSchedule", "StageSchedule", "stage_schedules"]

Kind = Literal["forward", "backward", "step", "evaluate", "wait"]
_LETTERS = {"forward": "F", "backward": "B", "step": "S", "evaluate": "E", "wait": "-"}


@config
class StageSchedule:
    """Parameters of a stage's schedule.

    Attributes:
        accumulate: Microbatches per optimizer step.
        depth: Largest number of microbatches in flight.
        delay: Largest staleness, in optimizer steps; `delay + 1` versions of the weights are live.
    """

    accumulate: int
    depth: int
    delay: int

    def __post_init__(self) -> None:
        require(self.accumulate >= 1, f"accumulate must be >= 1, got {self.accumulate}")
        require(self.depth >= 1, f"depth must be >= 1, got {self.depth}")
        require(self.delay >= 0, f"delay must be >= 0, got {self.delay}")

    def step_of(self, microbatch: int) -> int:
        return microbatch // self.accumulate

    def version(self, step: int) -> int:
        return max(0, step - self.delay)


def stage_schedules(
    depths: Sequence[int], accumulate: int, *, synchronous: bool = False, max_staleness: int | None = None
) -> list[StageSchedule]:
    """A schedule for each stage, with the smallest staleness that causes no bubble.

    If a step has at least as many microbatches as are in flight, the delay is one step for every stage, the last one
    included, so that each microbatch runs on one version of the whole model. Otherwise each stage gets the delay it
    needs, (depth - 1) / accumulate. A single stage needs no delay.
    """

    def delay(depth: int) -> int:
        if synchronous or max(depths) == 1:
            return 0
        needed = 1 if accumulate >= max(depths) else ceil((depth - 1) / accumulate)
        return needed if max_staleness is None else min(needed, max_staleness)

    return [StageSchedule(accumulate=accumulate, depth=depth, delay=delay(depth)) for depth in depths]


class Action(NamedTuple):
    """The next action. `number` is a microbatch, a step or an evaluation; `version` the weights to use.

    `reason` explains a wait.
    """

    kind: Kind
    number: int = -1
    version: int = -1
    reason: str = ""

    def __str__(self) -> str:
        return _LETTERS[self.kind] + (str(self.number) if self.number >= 0 else "")


_WAIT = Action("wait")


class _Input(NamedTuple):
    """A queued input of a forward: a training microbatch, or an evaluation."""

    evaluation: int = -1
    fresh: bool = False


_TRAINING = _Input()


class PipelineSchedule:
    """The schedule's state at one stage: fed with arrivals and completed actions, it returns the next action."""

    def __init__(
        self, rule: StageSchedule, *, is_last_stage: bool, steps_need_permission: bool = False, first_update: int = 0
    ) -> None:
        """Start before the first microbatch of step `first_update`.

        Args:
            rule: Parameters of the stage.
            is_last_stage: Whether a backward can follow its forward without a gradient from another stage.
            steps_need_permission: Whether a step waits for a norm or a tied gradient from other stages.
            first_update: Number of earlier updates; steps and microbatches are numbered from there.
        """
        self.rule = rule
        self.is_last_stage = is_last_stage
        self.first_update = first_update
        self.forwards = first_update * rule.accumulate  # completed forwards
        self.backwards = self.forwards  # completed backwards
        self.updates = first_update  # also the number of the newest version
        self.end: int | None = None  # the number of updates after which training ends
        self.staleness: Counter[int] = Counter()
        self._inputs: deque[_Input] = deque()  # arrived, not yet run
        self._gradients = self.backwards  # microbatches whose gradient has arrived
        self._allowed = first_update  # steps that have permission
        self._forward_is_due = False  # the last action was a backward
        self._steps_need_permission = steps_need_permission

    def input_arrived(self) -> None:
        self._inputs.append(_TRAINING)

    def evaluation_arrived(self, number: int, *, fresh: bool) -> None:
        """`fresh` waits for the update of every step before it; otherwise it uses the next microbatch's version."""
        self._inputs.append(_Input(number, fresh))

    def gradient_arrived(self) -> None:
        self._gradients += 1

    def allow_step(self) -> None:
        self._allowed += 1

    @property
    def in_flight(self) -> int:
        return self.forwards - self.backwards

    @property
    def queued(self) -> int:
        """Number of inputs that have arrived and not run."""
        return len(self._inputs)

    def next(self) -> Action:
        """The next action: a step, else the one of backward and forward that is due, else the other, else wait."""
        step = self.backwards // self.rule.accumulate
        if step > self.updates and (not self._steps_need_permission or self._allowed > self.updates):
            return Action("step", self.updates)
        ready = self.forwards if self.is_last_stage else self._gradients
        if self.backwards < ready and (self.end is None or step < self.end):
            forward = self._forward() if self._forward_is_due else _WAIT
            return Action("backward", self.backwards, self.rule.version(step)) if forward.kind == "wait" else forward
        return self._forward()

    def done(self, action: Action) -> None:
        """Record that an action has been completed."""
        match action.kind:
            case "forward":
                self._inputs.popleft()
                self.forwards += 1
                self._forward_is_due = False
            case "backward":
                self.backwards += 1
                self._forward_is_due = not self.is_last_stage
                self.staleness[self.rule.step_of(action.number) - action.version] += 1
            case "step":
                self.updates += 1
            case "evaluate":
                self._inputs.popleft()
                self._forward_is_due = False

    def _forward(self) -> Action:
        if not self._inputs:
            return Action("wait", reason="for an input" if self.is_last_stage else "for an input or a gradient")
        waiting = self._inputs[0]
        step = self.rule.step_of(self.forwards)
        version = step if waiting.fresh else self.rule.version(step)
        if self.updates < version:
            return Action("wait", reason=f"for version {version} of the weights, the newest is {self.updates}")
        if waiting.evaluation >= 0:
            return Action("evaluate", waiting.evaluation, version)
        if self.end is not None and step >= self.end:
            return Action("wait", reason=f"after the last update, {self.end}")
        if self.in_flight >= self.rule.depth:
            return Action("wait", reason=f"{self.in_flight} microbatches are in flight, the limit")
        return Action("forward", self.forwards, version)
