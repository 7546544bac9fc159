"""What an agent says on its console: one line for each change of what it is doing."""

from __future__ import annotations

from collections.abc import Callable

from ..core.clock import Clock, SystemClock
from ..core.config import format_bytes
from ..core.control import NodeProfile, Part, Report
from ..core.metrics import StageMetrics
from ..core.orders import Failed, Linked, Ready, Saved, Updated
from ..core.units import format_rate

__all__ = ["Speaker", "joined", "stage_of"]

_TRAINING_S = 10.0


class Speaker:
    """Says each thing once, until something else was said; training at most every ten seconds."""

    def __init__(self, write: Callable[[str], None], clock: Clock | None = None) -> None:
        self._write, self._clock = write, clock or SystemClock()
        self._last = ""
        self._part: Part | None = None
        self._since: tuple[float, int] | None = None  # the time of the last line about training, and its count
        self.doing = ""

    def say(self, line: str) -> None:
        self.doing = line
        if line != self._last:
            self._last = line
            self._write(line)

    def desired(self, part: Part | None, reason: str) -> None:
        self._part, self._since = part, None
        self.say(f"free: {reason}" if part is None else f"{stage_of(part)}: loading")

    def reported(self, report: Report) -> None:
        """What the worker says of its part, as far as its owner wants to know."""
        part = self._part
        if part is None or part.generation != report.generation:
            return
        match report.report:
            case Linked(peer=peer, reason=reason, hint=hint):
                self.say(f"link to {peer}: {reason}" + (f"; {hint}" if hint else ""))
            case Ready():
                self.say(f"{stage_of(part)}: ready")
            case Updated(metrics=metrics):
                self._updated(metrics)
            case Saved(is_state=True):
                pass
            case Saved():
                self.say(f"{stage_of(part)}: its weights are with the coordinator")
            case Failed(reason=reason):
                self.say(f"{stage_of(part)}: failed: {reason}")

    def _updated(self, metrics: StageMetrics) -> None:
        now_s = self._clock.now_s()
        if self._since is None:
            self._since = now_s, metrics.microbatches
            self.say(f"training: {_updates(metrics.updates)}")
            return
        began_s, before = self._since
        if now_s - began_s >= _TRAINING_S:
            rate = (metrics.microbatches - before) / (now_s - began_s)
            self._since = now_s, metrics.microbatches
            self.say(f"training: {_updates(metrics.updates)}, {rate:.3g} microbatches/s")


def joined(name: str, profile: NodeProfile) -> str:
    return (
        f"joined as {name}: {format_bytes(profile.memory_bytes)}, {profile.gflops:.3g} GFLOP/s, "
        f"{format_rate(profile.up_bytes_per_s)} up"
    )


def stage_of(part: Part) -> str:
    return f"stage {part.stage} of {part.count} in cluster {part.cluster}"


def _updates(count: int) -> str:
    return f"{count} update{'' if count == 1 else 's'}"
