"""Results of a simulation: clusters, their periods, the use of stages and links in each, totals, and a timeline.

A period is the time in which a cluster runs one plan; a failure ends it. Every fed microbatch is accounted for:

    fed = trained + lost + in flight          lost = repeated + unrepeated

`timeline` gives the recorded time in the Trace Event Format, for ui.perfetto.dev or chrome://tracing:

    json.dump({"traceEvents": timeline(simulation)}, file)

A cluster is a process. Each of its machines is a track of actions (F12, B12, S3), each line or link a track of the
messages that occupy it, and each stage has counters: microbatches in flight, and the memory they need. Times are in
microseconds. Faults and changes of plan are marks in a process of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any

from ravnest.core.config import require
from ravnest.planner.fleet import ClusterPlan
from ravnest.simulator.pipeline import ActionSpan, MessageSpan

__all__ = ["SimulatedCluster", "SimulatedEvent", "LinkUse", "Simulation", "Period", "StageUse", "Totals", "timeline"]


@dataclass(frozen=True)
class Totals:
    """Microbatches begun at the first stage, applied in a step, lost by failures, of those fed again, and in flight."""

    fed: int = 0
    trained: int = 0
    lost: int = 0
    repeated: int = 0
    in_flight: int = 0

    @property
    def unrepeated(self) -> int:
        """Lost, and not yet fed again."""
        return self.lost - self.repeated

    @staticmethod
    def of(parts: Iterable[Totals]) -> Totals:
        listed = list(parts)
        return Totals(*(sum(getattr(part, field.name) for part in listed) for field in fields(Totals)))


@dataclass(frozen=True)
class StageUse:
    """A stage in a period. `bubble` is the idle fraction of the steady time; None: the period was too short.

    `memory_bytes[k]` is the memory with k microbatches in flight by the memory model, up to the most there were.
    """

    machine: str
    busy_s: float
    idle_s: float
    bubble: float | None
    staleness: Counter[int]
    max_in_flight: int
    memory_bytes: tuple[int, ...]

    @property
    def peak_memory_bytes(self) -> int:
        return self.memory_bytes[-1]


@dataclass(frozen=True)
class LinkUse:
    """One direction of a link in a period: bytes in all, and per bucket of the simulated time.

    `utilisation` is the fraction of the period in which its messages occupied the slowest channel.
    """

    sender: str
    receiver: str
    num_bytes: int
    utilisation: float
    bytes_over_time: tuple[int, ...]


@dataclass(frozen=True)
class Period:
    """A cluster under one plan, from `start_s` to `end_s`.

    The steady time is from the first stage's step that finds the pipeline full to its last one. `actions` and
    `messages` are those of the recorded time; `channels` are the names of the channels that messages passed.
    """

    start_s: float
    end_s: float
    plan: ClusterPlan
    totals: Totals
    steady_microbatches: int
    steady_s: float
    stages: tuple[StageUse, ...]
    links: tuple[LinkUse, ...]
    end_reason: str
    channels: tuple[str, ...] = ()
    actions: tuple[ActionSpan, ...] = ()
    messages: tuple[MessageSpan, ...] = ()

    @property
    def steady_interval_s(self) -> float | None:
        """Seconds from one microbatch to the next; None: the period was too short."""
        return self.steady_s / self.steady_microbatches if self.steady_microbatches else None


@dataclass(frozen=True)
class SimulatedCluster:
    """All periods of a cluster, with `microbatch` samples per microbatch. Between periods it did not train."""

    periods: tuple[Period, ...]
    totals: Totals
    duration_s: float
    microbatch: int

    @property
    def samples_per_s(self) -> float:
        """Over the whole time, also when it did not train."""
        return self.totals.trained * self.microbatch / self.duration_s if self.duration_s else 0.0

    @property
    def steady_samples_per_s(self) -> float | None:
        """With the pipeline full; None: every period was too short."""
        seconds = sum(period.steady_s for period in self.periods)
        return (
            sum(period.steady_microbatches for period in self.periods) * self.microbatch / seconds if seconds else None
        )


@dataclass(frozen=True)
class SimulatedEvent:
    """A fault, or a change of plan."""

    time_s: float
    text: str


@dataclass(frozen=True)
class Simulation:
    """All clusters and events. Bytes over time are per `bucket_s`."""

    clusters: tuple[SimulatedCluster, ...]
    events: tuple[SimulatedEvent, ...]
    duration_s: float
    bucket_s: float

    @cached_property
    def totals(self) -> Totals:
        return Totals.of(cluster.totals for cluster in self.clusters)

    @property
    def samples_per_s(self) -> float:
        trained = sum(cluster.totals.trained * cluster.microbatch for cluster in self.clusters)
        return trained / self.duration_s if self.duration_s else 0.0

    @property
    def steady_samples_per_s(self) -> float:
        """Of the clusters that ran long enough, each with its pipeline full."""
        return sum(cluster.steady_samples_per_s or 0.0 for cluster in self.clusters)

    @property
    def bubble(self) -> float | None:
        """The idle fraction of all stages' steady time; None: all periods were too short."""
        bubbles = [(stage.bubble, period.steady_s) for period in self._periods for stage in period.stages]
        known = [(bubble, seconds) for bubble, seconds in bubbles if bubble is not None]
        whole = sum(seconds for _, seconds in known)
        return sum(bubble * seconds for bubble, seconds in known) / whole if whole else None

    @property
    def staleness(self) -> Counter[int]:
        """Number of gradients by their delay in steps, of all stages."""
        counts = Counter[int]()
        for period in self._periods:
            for stage in period.stages:
                counts.update(stage.staleness)
        return counts

    @property
    def _periods(self) -> Iterable[Period]:
        return (period for cluster in self.clusters for period in cluster.periods)


TraceEvent = dict[str, Any]

# The timeline.

_FLEET = 0  # the process of faults and plans; clusters count from 1


def timeline(simulation: Simulation, *, max_events: int = 200_000) -> list[TraceEvent]:
    """The first events of all clusters in order of time, ready for JSON."""
    require(max_events >= 1, f"max_events must be >= 1, got {max_events}")
    names = [_named("process_name", "fleet", _FLEET)]
    events: list[TraceEvent] = [
        {"name": h.text, "cat": "fault", "ph": "i", "s": "g", "ts": _us(h.time_s), "pid": _FLEET, "tid": 0}
        for h in simulation.events
    ]
    for number, cluster in enumerate(simulation.clusters, start=1):
        tracks = _Tracks(number)
        events += islice(_cluster_events(tracks, cluster), max_events)
        names += tracks.names
    events.sort(key=lambda event: event["ts"])
    return names + events[:max_events]


class _Tracks:
    """The tracks of a cluster, numbered as they appear."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.names = [_named("process_name", f"cluster {pid - 1}", pid)]
        self._numbers: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            self.names.append(_named("thread_name", name, self.pid, self._numbers[name]))
        return self._numbers[name]


def _cluster_events(tracks: _Tracks, cluster: SimulatedCluster) -> Iterator[TraceEvent]:
    for period in cluster.periods:
        yield from _actions(tracks, period)
        yield from _messages(tracks, period)


def _actions(tracks: _Tracks, period: Period) -> Iterator[TraceEvent]:
    in_flight = [0] * len(period.stages)
    for span in period.actions:
        machine = period.plan.members[span.stage]
        yield {
            **_complete(str(span.action), span.start_s, span.end_s, tracks.pid, tracks[machine]),
            "cat": span.action.kind,
            "args": {"stage": span.stage, "version": span.action.version},
        }
        if span.action.kind in ("forward", "backward") and span.end_s < period.end_s:
            in_flight[span.stage] += 1 if span.action.kind == "forward" else -1
            yield from _counters(tracks, period, span.stage, in_flight[span.stage], span.end_s)


def _counters(tracks: _Tracks, period: Period, stage: int, in_flight: int, time_s: float) -> Iterator[TraceEvent]:
    machine = period.plan.members[stage]
    amounts = {"in flight": in_flight, "memory bytes": period.stages[stage].memory_bytes[in_flight]}
    for what, amount in amounts.items():
        yield {
            "name": f"{machine} {what}", "ph": "C", "ts": _us(time_s), "pid": tracks.pid, "args": {what: amount},
        }  # fmt: skip


def _messages(tracks: _Tracks, period: Period) -> Iterator[TraceEvent]:
    for span in period.messages:
        track = tracks[period.channels[span.channel]]
        yield {**_complete(span.name, span.start_s, span.end_s, tracks.pid, track), "cat": "message"}


def _complete(name: str, start_s: float, end_s: float, pid: int, tid: int) -> TraceEvent:
    return {"name": name, "ph": "X", "ts": _us(start_s), "dur": _us(end_s) - _us(start_s), "pid": pid, "tid": tid}


def _named(what: str, name: str, pid: int, tid: int = 0) -> TraceEvent:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
