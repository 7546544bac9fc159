"""The console of an agent: one line for each change of its activity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ravnest.core.clock import Clock, SystemClock
from ravnest.core.metrics import StageMetrics
from ravnest.core.units import format_bytes, format_rate, format_seconds
from ravnest.protocol.commands import LinkReport, StageFailed, StageReady, StateSaved, StepReport
from ravnest.protocol.control import Assignment, NodeProfile, NodeWork, StageReport

__all__ = ["AgentConsole", "given", "joined", "thanks"]

_TRAINING_S = 10.0


class AgentConsole:
    """Prints a line when it differs from the last; progress of training at most every ten seconds."""

    def __init__(self, write: Callable[[str], None], clock: Clock | None = None) -> None:
        self._write, self._clock = write, clock or SystemClock()
        self._last = ""
        self._assignment: Assignment | None = None
        self._progress: tuple[float, int] | None = None  # time and microbatches at the last line about training
        self._activity = ""
        self._wait: tuple[str, float] | None = None  # the reason, and when it ends at the latest
        self.metrics: StageMetrics | None = None  # the latest of the present stage
        self.num_updates = self.num_microbatches = 0  # of the stages before

    @property
    def assignment(self) -> Assignment | None:
        """The stage that this node has, if it has one."""
        return self._assignment

    @property
    def activity(self) -> str:
        """What this node does now; a wait counts down."""
        if self._wait is None:
            return self._activity
        reason, until_s = self._wait
        return f"{reason} within {max(until_s - self._clock.now_s(), 0.0):.0f} s"

    def log(self, line: str) -> None:
        self._activity, self._wait = line, None
        if line != self._last:
            self._last = line
            self._write(line)

    def note(self, line: str) -> None:
        """Print a line that says nothing about the activity."""
        if line != self._last:
            self._last = line
            self._write(line)

    def assigned(self, assignment: Assignment | None, reason: str) -> None:
        self._assignment, self._progress = assignment, None
        if self.metrics is not None:
            self.num_updates += self.metrics.updates
            self.num_microbatches += self.metrics.microbatches
            self.metrics = None
        self.log(f"free: {reason}" if assignment is None else f"{stage_of(assignment)}: loading")

    def waiting(self, reason: str, within_s: float | None) -> None:
        """Print why this node waits, and for how long at most."""
        self.log(reason if within_s is None else f"{reason} within {within_s:.0f} s")
        if within_s is not None:
            self._wait = reason, self._clock.now_s() + within_s

    def worker_lost(self, reason: str, wait_s: float, log: Path) -> None:
        self.log(f"{reason}; starting another in {wait_s:.1f} s. Its log: {log}")

    def reported(self, report: StageReport) -> None:
        """Print reports of the stage that concern the owner."""
        assignment = self._assignment
        if assignment is None or assignment.generation != report.generation:
            return
        match report.report:
            case LinkReport(peer=peer, reason=reason, hint=hint):
                self.log(f"link to {peer}: {reason}" + (f"; {hint}" if hint else ""))
            case StageReady():
                self.log(f"{stage_of(assignment)}: ready")
            case StepReport(metrics=metrics):
                self._updated(metrics)
            case StateSaved(is_state=True):
                pass
            case StateSaved():
                self.log(f"{stage_of(assignment)}: weights sent to the coordinator")
            case StageFailed(reason=reason):
                self.log(f"{stage_of(assignment)}: failed: {reason}")

    def _updated(self, metrics: StageMetrics) -> None:
        now_s = self._clock.now_s()
        self.metrics = metrics
        if self._progress is None:
            self._progress = now_s, metrics.microbatches
            self.log(f"training: {_updates(metrics.updates)}")
            return
        last_s, before = self._progress
        if now_s - last_s >= _TRAINING_S:
            rate = (metrics.microbatches - before) / (now_s - last_s)
            self._progress = now_s, metrics.microbatches
            self.log(f"training: {_updates(metrics.updates)}, {rate:.3g} microbatches/s")


def joined(name: str, profile: NodeProfile) -> str:
    place = "" if profile.device == "cpu" else f" on {profile.full_device}"
    return (
        f"joined as {name}: {format_bytes(profile.memory_bytes)}, {profile.gflops:.3g} GFLOP/s{place}, "
        f"{format_rate(profile.up_bytes_per_s)} up"
    )


def thanks(contribution: NodeWork | None) -> str:
    """Return what to say to the owner at the end of a run."""
    if contribution is None or not contribution.batches:
        return "the run has ended: thank you for lending this PC; it did not train"
    return f"the run has ended: thank you. {given(contribution)}"


def given(contribution: NodeWork) -> str:
    hours = contribution.seconds / 3600
    return (
        f"This PC trained {contribution.batches} batches ({contribution.samples} samples) in "
        f"{f'{hours:.3g} h' if hours >= 1 else format_seconds(contribution.seconds)}, sent "
        f"{format_bytes(contribution.sent_bytes)} and received {format_bytes(contribution.received_bytes)}"
    )


def stage_of(assignment: Assignment) -> str:
    return f"stage {assignment.stage} of {assignment.count} in cluster {assignment.cluster}"


def _updates(count: int) -> str:
    return f"{count} update{'' if count == 1 else 's'}"
