"""What a simulation found: of each cluster its spells, of each spell its stages and links, and the sums of all.

A spell is a stretch of time in which a cluster runs one plan; a failure ends it. Every microbatch that was fed is
accounted for:

    fed = trained + lost + in flight          lost = repeated + waiting to be repeated
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property

from .fleet import ClusterPlan
from .pipe import ActionSpan, MessageSpan

__all__ = ["ClusterRun", "Happening", "LinkUse", "Simulation", "Spell", "StageUse", "Totals"]


@dataclass(frozen=True)
class Totals:
    """Microbatches: begun at the root, applied in an update, lost with a failure, of those fed again, under way."""

    fed: int = 0
    trained: int = 0
    lost: int = 0
    repeated: int = 0
    in_flight: int = 0

    @property
    def waiting(self) -> int:
        """Lost, and not yet fed again."""
        return self.lost - self.repeated

    @staticmethod
    def of(parts: Iterable[Totals]) -> Totals:
        listed = list(parts)
        return Totals(*(sum(getattr(part, field.name) for part in listed) for field in fields(Totals)))


@dataclass(frozen=True)
class StageUse:
    """A stage in a spell. `bubble` is the part of the steady time in which it did nothing; None: too short to tell.

    `memory_bytes[k]` is what the memory model says of k microbatches in flight, up to the most there were.
    """

    machine: str
    busy_s: float
    idle_s: float
    bubble: float | None
    staleness: Counter[int]
    most_in_flight: int
    memory_bytes: tuple[int, ...]

    @property
    def peak_memory_bytes(self) -> int:
        return self.memory_bytes[-1]


@dataclass(frozen=True)
class LinkUse:
    """One way of a link in a spell: bytes in all and per bucket of the simulation's time.

    `utilisation` is how much of the spell its slowest part was busy with it alone.
    """

    sender: str
    receiver: str
    num_bytes: int
    utilisation: float
    bytes_over_time: tuple[int, ...]


@dataclass(frozen=True)
class Spell:
    """A cluster under one plan, from `start_s` to `end_s`; `ended` says why it did not go on.

    The steady part is from the root's update that finds the pipe full to its last one. `actions` and `messages` are
    of the time that was recorded; `channels` names what the messages passed.
    """

    start_s: float
    end_s: float
    plan: ClusterPlan
    totals: Totals
    steady_microbatches: int
    steady_s: float
    stages: tuple[StageUse, ...]
    links: tuple[LinkUse, ...]
    ended: str
    channels: tuple[str, ...] = ()
    actions: tuple[ActionSpan, ...] = ()
    messages: tuple[MessageSpan, ...] = ()

    @property
    def steady_interval_s(self) -> float | None:
        """Seconds from one microbatch to the next; None: too short to tell."""
        return self.steady_s / self.steady_microbatches if self.steady_microbatches else None


@dataclass(frozen=True)
class ClusterRun:
    """A cluster's life, with `microbatch` samples per microbatch. Between spells it stood still."""

    spells: tuple[Spell, ...]
    totals: Totals
    duration_s: float
    microbatch: int

    @property
    def samples_per_s(self) -> float:
        """Over the whole time, standing still included."""
        return self.totals.trained * self.microbatch / self.duration_s if self.duration_s else 0.0

    @property
    def steady_samples_per_s(self) -> float | None:
        """With the pipe full; None: never long enough to tell."""
        seconds = sum(spell.steady_s for spell in self.spells)
        return sum(spell.steady_microbatches for spell in self.spells) * self.microbatch / seconds if seconds else None


@dataclass(frozen=True)
class Happening:
    """Something that changed who does what, in words."""

    time_s: float
    machine: str
    text: str


@dataclass(frozen=True)
class Simulation:
    """All clusters together. Bytes over time are per `bucket_s`."""

    clusters: tuple[ClusterRun, ...]
    happenings: tuple[Happening, ...]
    duration_s: float
    bucket_s: float

    @cached_property
    def totals(self) -> Totals:
        return Totals.of(run.totals for run in self.clusters)

    @property
    def samples_per_s(self) -> float:
        trained = sum(run.totals.trained * run.microbatch for run in self.clusters)
        return trained / self.duration_s if self.duration_s else 0.0

    @property
    def steady_samples_per_s(self) -> float:
        """Of the clusters that ran long enough to tell, each with its pipe full."""
        return sum(run.steady_samples_per_s or 0.0 for run in self.clusters)

    @property
    def bubble(self) -> float | None:
        """The part of all stages' steady time in which they did nothing; None: too short to tell."""
        parts = [(stage.bubble, spell.steady_s) for spell in self._spells for stage in spell.stages]
        known = [(bubble, seconds) for bubble, seconds in parts if bubble is not None]
        whole = sum(seconds for _, seconds in known)
        return sum(bubble * seconds for bubble, seconds in known) / whole if whole else None

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients, of all stages, were how many updates late."""
        found = Counter[int]()
        for spell in self._spells:
            for stage in spell.stages:
                found.update(stage.staleness)
        return found

    @property
    def _spells(self) -> Iterable[Spell]:
        return (spell for run in self.clusters for spell in run.spells)
