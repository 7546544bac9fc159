"""The values that the pages show, by key, and their changes.

The document of a run is a flat map: `run`, `rings`, `node/NAME`, `cluster/ID`, `stage/ID/I`, `plan/ID`, `given/NAME`,
`given-total`, `event/N`. Each value is encoded once per change; a delta holds the values that changed, for all viewers
the same bytes. Values hold no ages and no current time, so that a value without news is equal to the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

from ravnest.coordinator.status import ClusterStatus, NodeStatus, RunStatus
from ravnest.core.metrics import StageMetrics
from ravnest.dashboard.history import EventRow, PlanRow, RunHistory
from ravnest.dashboard.series import Series

__all__ = ["LiveDocument", "contribution_values", "document_values", "encoded"]

_SILENT_S = 15.0


def document_values(status: RunStatus, history: RunHistory) -> Iterator[tuple[str, Any]]:
    """Yield all keys with their values, except for contributions."""
    yield "run", {
        "name": status.run, "release": status.release, "started_s": round(status.now_s - status.uptime_s, 1),
        "end_reason": status.end_reason, "steps_done": status.steps_done, "steps": status.steps,
        "generation": status.generation, "labels": history.labels, "leases": status.leases,
        "plan_reason": history.plan_reason, "left_out": history.left_out, "num_rejected": status.num_rejected,
        "rounds": status.rounds_done, "round_s": round(history.round_s, 2), "upgrade": history.upgrade,
        "waiting": status.waiting,
    }  # fmt: skip
    yield "rings", status.rings
    for node in status.nodes:
        yield f"node/{node.name}", _node(node, status.now_s)
    for cluster in status.clusters:
        if cluster.phase in ("forming", "training") or cluster.id in history.plans:
            yield f"cluster/{cluster.id}", _cluster(cluster)
            for stage, metrics in sorted(history.stages.get(cluster.id, {}).items()):
                yield f"stage/{cluster.id}/{stage}", metrics
    for name, plan in history.plans.items():
        yield f"plan/{name}", plan
    for row in history.events:
        yield f"event/{row.number}", row


def contribution_values(status: RunStatus, history: RunHistory) -> Iterator[tuple[str, Any]]:
    """Yield the contributions of all nodes, and the totals of the run at the same moment."""
    contributions = history.contributions
    yield "given-total", {
        "batches": contributions.batches, "samples": contributions.samples, "settled": status.leases.settled,
        "repeated": status.leases.repeated,
    }  # fmt: skip
    for name, given in contributions.totals(status.now_s).items():
        yield f"given/{name}", {
            **msgspec.structs.asdict(given), "work": round(given.work, 3), "seconds": round(given.seconds, 1),
            "busy_s": round(given.busy_s, 2) if isfinite(given.busy_s) else 0.0,
        }  # fmt: skip


def _node(node: NodeStatus, now_s: float) -> dict[str, Any]:
    age_s = node.last_seen_age_s
    return {
        "name": node.name, "state": node.state, "reason": node.reason, "profile": node.profile,
        "activity": node.activity, "cluster": node.cluster, "stage": node.stage, "links": node.links,
        "silent_since_s": round(now_s - age_s, 0) if age_s is not None and age_s > _SILENT_S else None,
        "replicas": [(held.cluster, held.stage, held.updates) for held in node.replicas],
        "speed_factor": round(node.speed_factor, 3), "num_losses": node.num_losses,
    }  # fmt: skip


def _cluster(cluster: ClusterStatus) -> dict[str, Any]:
    rate = cluster.samples_per_s
    return {
        "id": cluster.id, "phase": cluster.phase, "generation": cluster.generation, "reason": cluster.reason,
        "plan_reason": cluster.plan_reason, "members": [stage.name for stage in cluster.stages],
        "ready": [stage.is_ready for stage in cluster.stages], "cuts": cluster.cuts,
        "planned": cluster.planned_samples_per_s, "samples_per_s": None if rate is None else round(rate, 2),
        "loss": cluster.loss, "leases": cluster.leases, "averaging": cluster.averaging,
    }  # fmt: skip


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Times come from nodes and are not trusted; they are rounded to milliseconds."""
    return {
        name: (round(value, 3) if isfinite(value) else 0.0) if isinstance(value, float) else value
        for name, value in metrics.items()
    }


def encoded(value: Any) -> bytes:
    """Return a value as JSON."""
    return msgspec.json.encode(_finite(msgspec.structs.asdict(value)) if isinstance(value, StageMetrics) else value)


_REPLACED = (EventRow, PlanRow, StageMetrics)


class LiveDocument:
    """The encoded values and curves that viewers have after the last delta."""

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self.encoded: dict[str, bytes] = {}
        self._replaced: dict[str, Any] = {}  # values that are replaced, never changed: the same object is no news
        self._sent = {"steps": (0, 0), "evaluations": (0, 0)}  # thinned, points
        self._snapshot: bytes | None = None

    def update(self, values: Mapping[str, Any], *, keep: str = "") -> bytes | None:
        """Take over new values and points; return the delta, or None if nothing changed.

        Keys that are missing in `values` are dropped, except for those that begin with `keep`.
        """
        changed = self._changed(values)
        dropped = [key for key in self.encoded if key not in values and not (keep and key.startswith(keep))]
        for key in dropped:
            del self.encoded[key]
            self._replaced.pop(key, None)
        return self._delta(changed, dropped)

    def add(self, values: Mapping[str, Any]) -> bytes | None:
        """Take over some values, and new points; return the delta, or None if nothing changed."""
        return self._delta(self._changed(values), ())

    def _changed(self, values: Mapping[str, Any]) -> dict[str, bytes]:
        changed: dict[str, bytes] = {}
        for key, value in values.items():
            if isinstance(value, _REPLACED):
                if self._replaced.get(key) is value:
                    continue
                self._replaced[key] = value
            data = encoded(value)
            if self.encoded.get(key) != data:
                self.encoded[key] = changed[key] = data
        return changed

    def _delta(self, changed: Mapping[str, bytes], dropped: Sequence[str]) -> bytes | None:
        parts = [b'"set":' + _joined(changed)] if changed else []
        parts += [b'"drop":' + msgspec.json.encode(dropped)] if dropped else []
        parts += [part for name, series in self._series() if (part := self._new_points(name, series))]
        if not parts:
            return None
        self._snapshot = None
        return b"{" + b",".join(parts) + b"}"

    def snapshot(self) -> bytes:
        """Return everything, for a new viewer."""
        if self._snapshot is None:
            series = b",".join(
                b'"%s":' % name.encode() + msgspec.json.encode(self._all(name, series))
                for name, series in self._series()
            )
            self._snapshot = b'{"reset":true,"set":' + _joined(self.encoded) + b"," + series + b"}"
        return self._snapshot

    def _series(self) -> list[tuple[str, Series]]:
        return [("steps", self._history.steps), ("evaluations", self._history.evaluations)]

    def _all(self, name: str, series: Series) -> dict[str, Any]:
        """All points that viewers with every delta have."""
        return {"from": 0, "points": series.points[: self._sent[name][1]]}

    def _new_points(self, name: str, series: Series) -> bytes | None:
        thinned, count = self._sent[name]
        first = count if thinned == series.thinned else 0
        new = series.points[first:]
        self._sent[name] = series.thinned, len(series.points)
        if not new and thinned == series.thinned:
            return None
        return b'"%s":' % name.encode() + msgspec.json.encode({"from": first, "points": new})


def _joined(values: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(msgspec.json.encode(key) + b":" + data for key, data in values.items()) + b"}"
