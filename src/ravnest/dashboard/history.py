"""The history of a run that its pages show: events, curves, plans, contributions. Kept in memory, and in one file.

`dashboard.json` in the run's folder holds the last values of the pages (`document`) and what a resumed run continues
from. It is replaced as a whole, so that it is never incomplete; curves come from `metrics.jsonl`, whose last line may
be incomplete after a crash. Owned by one thread.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ravnest.coordinator import events as on
from ravnest.coordinator.event_log import describe
from ravnest.core.metrics import StageMetrics
from ravnest.dashboard.contributions import Contributions, NodeContribution
from ravnest.dashboard.series import NodeSeries, Series

__all__ = ["PlanRow", "RunHistory", "Saved", "load_saved", "read_lines"]

FILE = "dashboard.json"

_MAX_EVENTS = 400
_FREQUENT = ("LinkEstablished", "NodeAveragingFailed", "NodeConnected", "NodeEnrolled", "NodeReady", "RoundCommitted")
_MAX_FREQUENT = 60  # events of each of these kinds
_MAX_CLUSTERS = 1000  # of which members are known
_MAX_NODES = 5000  # with a series
_MAX_FILE_BYTES = 256 << 20
_POSITION = ("step", "cluster", "seconds", "samples", "stages", "evaluation")


class EventRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An event in a sentence, and the nodes that it is about."""

    number: int
    at_s: float
    kind: str
    text: str
    nodes: tuple[str, ...] = ()


class PlanRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plan of a cluster: `content` is that of `plan.json`, `shares` those of its stages in the compute."""

    members: tuple[str, ...]
    shares: tuple[float, ...]
    content: dict[str, Any]


class _Left(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    reason: str
    is_spare: bool


class Saved(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The contents of `dashboard.json`."""

    document: dict[str, msgspec.Raw] = {}
    events: list[EventRow] = []
    members: dict[str, tuple[str, ...]] = {}
    past: dict[str, NodeContribution] = {}
    batches: int = 0
    samples: int = 0


class RunHistory:
    """Collects events and metrics of a run."""

    def __init__(self, saved: Saved | None = None) -> None:
        saved = saved or Saved()
        self.events: deque[EventRow] = deque(saved.events, maxlen=_MAX_EVENTS)
        self.members = dict(saved.members)
        self.contributions = Contributions(saved.past, batches=saved.batches, samples=saved.samples)
        self.labels: list[str] = []
        self.steps, self.evaluations = Series(), Series()
        self.nodes: dict[str, NodeSeries] = {}
        self.stages: dict[str, dict[int, StageMetrics]] = {}  # the last metrics, by cluster and stage
        self.plans: dict[str, PlanRow] = {}  # of clusters that were not replaced
        self.left_out: tuple[_Left, ...] = ()  # of the last plan
        self.plan_reason = ""
        self.upgrade: dict[str, Any] | None = None  # that would help the present plan most
        self.round_s = 0.0  # of all averagings
        self._samples = 0
        self._number = self.events[-1].number + 1 if self.events else 0

    def add_event(self, event: on.Event) -> None:
        """Record an event, except for leases (`settle`). Addresses of nodes are left out."""
        match event:
            case on.ConnectionRejected() | on.TokenIssued():
                return
            case on.NodeConnected():
                event = msgspec.structs.replace(event, address="")
            case on.PlanCreated(spares=spares, left_out=left_out, reason=reason):
                self.left_out = tuple(
                    _Left(name=one.name, reason=one.reason, is_spare=one in spares) for one in (*spares, *left_out)
                )
                self.plan_reason, self.upgrade = reason, None
            case on.RoundCommitted(took_s=took_s):
                self.round_s += took_s
            case on.ClusterEnded(at_s=at_s, cluster=cluster, is_lost=is_lost, is_replanned=is_replanned):
                self.contributions.end(cluster, at_s)
                if is_lost or is_replanned:  # the others are those of the whole run
                    self.plans.pop(cluster, None)
        text = describe(event)
        if text is not None:
            row = EventRow(
                number=self._number, at_s=event.at_s, kind=type(event).__name__, text=text, nodes=_nodes(event)
            )
            self.events.append(row)
            self._number += 1
            self._limit(row.kind)

    def _limit(self, kind: str) -> None:
        """Drop the oldest event of a frequent kind, so that the others are not pushed out."""
        if kind in _FREQUENT:
            same = [row for row in self.events if row.kind == kind]
            if len(same) > _MAX_FREQUENT:
                self.events.remove(same[0])

    def add_plan(self, cluster: str, members: Sequence[str], shares: Sequence[float], content: dict[str, Any]) -> None:
        """Record the plan of a cluster that is forming."""
        self.plans[cluster] = PlanRow(members=tuple(members), shares=tuple(shares), content=content)
        self.members[cluster] = tuple(members)
        if len(self.members) > _MAX_CLUSTERS:
            del self.members[next(iter(self.members))]
        self.contributions.form(cluster, members, shares)

    def add_simulation(self, cluster: str, simulation: dict[str, Any]) -> None:
        """Add the simulated timeline of a cluster to its plan, unless it has ended."""
        if (row := self.plans.get(cluster)) is not None:
            content = {**row.content, "simulation": simulation}
            self.plans[cluster] = msgspec.structs.replace(row, content=content)

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Record a line of `metrics.jsonl`; lines of other forms are ignored."""
        with contextlib.suppress(TypeError, ValueError, KeyError, msgspec.ValidationError):
            self._add_line(line)

    def _add_line(self, line: Mapping[str, Any]) -> None:
        is_step = "step" in line
        if not self.labels:
            self.labels = [name for name in line if name not in _POSITION]
        values = [float(line.get(name, math.nan)) for name in self.labels]
        seconds, number = float(line["seconds"]), int(line["step"] if is_step else line["evaluation"])
        if not is_step:
            self.evaluations.add([number, seconds, self._samples, *values])
            return
        self._samples += int(line.get("samples", 0))
        self.steps.add([number, seconds, self._samples, *values])
        cluster = str(line.get("cluster", ""))
        for entry in line.get("stages", ()):
            metrics = msgspec.convert(entry, StageMetrics, strict=False)
            self.stages.setdefault(cluster, {})[metrics.stage] = metrics
            self.contributions.report(cluster, metrics)
            members = self.members.get(cluster, ())
            if 0 <= metrics.stage < len(members):
                self._add_node(members[metrics.stage], seconds, metrics)
        while len(self.stages) > _MAX_CLUSTERS:
            del self.stages[next(iter(self.stages))]

    def _add_node(self, name: str, seconds: float, metrics: StageMetrics) -> None:
        if name in self.nodes or len(self.nodes) < _MAX_NODES:
            self.nodes.setdefault(name, NodeSeries()).add([
                seconds, metrics.microbatches, metrics.busy_s, metrics.idle_s, metrics.memory_bytes,
                metrics.sent_bytes, metrics.received_bytes,
            ])  # fmt: skip

    def node(self, name: str) -> dict[str, Any]:
        """Return the series of a node; empty without any step."""
        points = self.nodes[name].points if name in self.nodes else []
        return {"name": name, "columns": NodeSeries.COLUMNS, "points": points}

    def save(self, folder: Path, document: Mapping[str, bytes], now_s: float) -> None:
        """Replace `dashboard.json`; a full disk costs the file and nothing else.

        A run that is killed and resumed continues from the contributions of all clusters at this moment.
        """
        saved = Saved(
            document={key: msgspec.Raw(value) for key, value in document.items()},
            events=list(self.events), members=self.members, past=self.contributions.totals(now_s),
            batches=self.contributions.batches, samples=self.contributions.samples,
        )  # fmt: skip
        draft = folder / f".{FILE}"
        with contextlib.suppress(OSError):
            draft.write_bytes(msgspec.json.encode(saved))
            draft.replace(folder / FILE)


def load_saved(folder: Path) -> Saved | None:
    """Return the contents of `dashboard.json`; None if there is none, or if another release wrote it."""
    path = folder / FILE
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if path.stat().st_size <= _MAX_FILE_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=Saved)
    return None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a `metrics.jsonl`, which may have an incomplete last one."""
    with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict):
                    yield line


def _nodes(event: on.Event) -> tuple[str, ...]:
    """Return the nodes that an event is about."""
    if isinstance(event, on.PlanCreated):
        return tuple(name for cluster in event.clusters for name in cluster.members)
    if isinstance(event, on.LinkEstablished):
        return (event.node, event.peer)
    if isinstance(event, on.PlanFailed):
        return event.nodes
    name = getattr(event, "name", None)
    return (name,) if isinstance(name, str) else ()
