"""What a stage does next: a state machine without clock or I/O, the same in a worker, the simulator and the tests.

Never a flush; backward and forward in turns where both could be done. With A = `accumulate`, window w is the
microbatches m with m // A == w, and update w applies the gradient of window w to weights version w, giving version
w + 1. Every microbatch of window w runs, forward and backward, on version

    version(w) = max(0, w - delay)

and nothing else, however the timing falls: so the same seed gives the same weights. Its staleness is
w - version(w) <= delay. Three settings of one rule:

    delay 0                          synchronous: flush each window
    delay 1, accumulate >= depth     double-buffered: two versions live, no bubble (the default)
    delay d, accumulate 1            the paper's: a version per microbatch in flight, d = depth - 1 <= 2 (N - j)

A forward waits while `depth` microbatches are in flight at this stage, or while its version does not exist yet.

Why in turns: gradients that arrive in a clump and all go first leave the next stage without work, whose gradients then
come in a clump again, for ever. Over links with latency that cost up to a third of the samples (`plan.simulate`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from math import ceil
from typing import Literal, NamedTuple

from .config import config, require

__all__ = ["Action", "Kind", "Rule", "Schedule", "grid", "rules"]

Kind = Literal["forward", "backward", "step", "evaluate", "wait"]
_SIGNS = {"forward": "F", "backward": "B", "step": "S", "evaluate": "E", "wait": "-"}


@config
class Rule:
    """How a stage trains: microbatches per update, microbatches in flight, updates of delay."""

    accumulate: int
    depth: int
    delay: int

    def __post_init__(self) -> None:
        require(self.accumulate >= 1, f"accumulate must be at least 1, not {self.accumulate}")
        require(self.depth >= 1, f"depth must be at least 1, not {self.depth}")
        require(self.delay >= 0, f"delay must be at least 0, not {self.delay}")

    def window(self, microbatch: int) -> int:
        return microbatch // self.accumulate

    def version(self, window: int) -> int:
        return max(0, window - self.delay)

    @property
    def live_versions(self) -> int:
        """How many versions of the weights exist at once, at the most."""
        return self.delay + 1


def rules(
    depths: Sequence[int], accumulate: int, *, synchronous: bool = False, max_staleness: int | None = None
) -> list[Rule]:
    """A rule for each stage, with the smallest delay that costs no bubble.

    If a window holds all that is in flight it is one update, at the leaf too, so that every microbatch runs on one
    version of the whole model. Else it is what each stage needs: (depth - 1) / accumulate. One stage alone needs none.
    """

    def delay(depth: int) -> int:
        if synchronous or max(depths) == 1:
            return 0
        natural = 1 if accumulate >= max(depths) else ceil((depth - 1) / accumulate)
        return natural if max_staleness is None else min(natural, max_staleness)

    return [Rule(accumulate=accumulate, depth=depth, delay=delay(depth)) for depth in depths]


class Action(NamedTuple):
    """One thing to do. `number` is a microbatch, a window or an evaluation; `version` the weights to use.

    A wait says in `reason` what it waits for.
    """

    kind: Kind
    number: int = -1
    version: int = -1
    reason: str = ""

    def __str__(self) -> str:
        return _SIGNS[self.kind] + (str(self.number) if self.number >= 0 else "")


_WAIT = Action("wait")


class _Input(NamedTuple):
    """What waits to go forward: a microbatch, or an evaluation."""

    evaluation: int = -1
    fresh: bool = False


_TRAINING = _Input()


class Schedule:
    """The state of one stage. Tell it what arrived and what is done; ask it what is next."""

    def __init__(
        self, rule: Rule, *, is_leaf: bool, steps_need_permission: bool = False, first_update: int = 0
    ) -> None:
        """`steps_need_permission` if a step waits for a norm or a tied gradient from other stages.

        `first_update` is how many there have been before: windows and microbatches count on from there.
        """
        self.rule = rule
        self.is_leaf = is_leaf
        self.first_update = first_update
        self.forwards = first_update * rule.accumulate  # microbatches that went forward
        self.backwards = self.forwards  # microbatches that came back
        self.updates = first_update  # also the number of the newest version
        self.end: int | None = None  # the number of updates after which nothing more is trained
        self.staleness: Counter[int] = Counter()
        self._inputs: deque[_Input] = deque()  # arrived and not yet run
        self._gradients = self.backwards  # microbatches whose gradient has arrived
        self._allowed = first_update  # windows whose step may be done
        self._forward_is_due = False  # the last to be computed was a backward
        self._must_allow = steps_need_permission

    def input_arrived(self) -> None:
        self._inputs.append(_TRAINING)

    def evaluation_arrived(self, number: int, *, fresh: bool) -> None:
        """`fresh` waits for the update of every window before it; else it uses what the next microbatch will."""
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
        """Inputs that arrived and wait."""
        return len(self._inputs)

    def next(self) -> Action:
        """The next thing to do: a step, else the one of backward and forward that is due, else the other, else wait."""
        window = self.backwards // self.rule.accumulate
        if window > self.updates and (not self._must_allow or self._allowed > self.updates):
            return Action("step", self.updates)
        come_back = self.forwards if self.is_leaf else self._gradients
        if self.backwards < come_back and (self.end is None or window < self.end):
            forward = self._forward() if self._forward_is_due else _WAIT
            return Action("backward", self.backwards, self.rule.version(window)) if forward.kind == "wait" else forward
        return self._forward()

    def done(self, action: Action) -> None:
        """Note that an action has been carried out."""
        match action.kind:
            case "forward":
                self._inputs.popleft()
                self.forwards += 1
                self._forward_is_due = False
            case "backward":
                self.backwards += 1
                self._forward_is_due = not self.is_leaf
                window = self.rule.window(action.number)
                self.staleness[window - action.version] += 1
            case "step":
                self.updates += 1
            case "evaluate":
                self._inputs.popleft()
                self._forward_is_due = False

    def _forward(self) -> Action:
        if not self._inputs:
            return Action("wait", reason="for an input" if self.is_leaf else "for an input or a gradient")
        waiting = self._inputs[0]
        window = self.rule.window(self.forwards)
        version = window if waiting.fresh else self.rule.version(window)
        if self.updates < version:
            return Action("wait", reason=f"for version {version} of the weights, the newest is {self.updates}")
        if waiting.evaluation >= 0:
            return Action("evaluate", waiting.evaluation, version)
        if self.end is not None and window >= self.end:
            return Action("wait", reason=f"after the last update, {self.end}")
        if self.in_flight >= self.rule.depth:
            return Action("wait", reason=f"{self.in_flight} microbatches are in flight, as many as may be")
        return Action("forward", self.forwards, version)


def grid(rows: list[list[Action]], width: int = 4) -> str:
    """Stages as lines, moments as columns: `F0  F1  B0  ...`, to look at and to compare."""
    return "\n".join("".join(str(action).ljust(width) for action in row).rstrip() for row in rows)
