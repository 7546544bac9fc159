"""The state of a run as Prometheus metrics, in the text format 0.0.4: `/metrics` next to the pages.

Counters that nodes report begin again when a node gets another stage, as counters of a restarted process do. Names of
nodes are label values, and escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

from ravnest.coordinator.status import RunStatus
from ravnest.core.metrics import StageMetrics
from ravnest.core.units import UNLIMITED_BYTES
from ravnest.dashboard.history import RunHistory

__all__ = ["CONTENT_TYPE", "metrics_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_POSITIONS = 3  # columns of a point before its values
_NODE_STATES = ("free", "forming", "training", "leaving", "quarantined", "gone", "kicked", "enrolled")
_STAGE_COUNTERS = {
    "updates": "Optimizer steps of a stage.",
    "microbatches": "Microbatches of a stage.",
    "busy_s": "Seconds in which a stage computed.",
    "idle_s": "Seconds in which a stage waited, after its first update.",
    "sent_bytes": "Bytes that a stage sent to its neighbours.",
    "received_bytes": "Bytes that a stage received from its neighbours.",
}
_UNITS = {"_s": "_seconds", "_bytes": "_bytes"}

Sample = tuple[Mapping[str, str], float | None]


def metrics_text(status: RunStatus, history: RunHistory) -> bytes:
    """Return all metrics of a run."""
    lines: list[str] = []
    for name, kind, text, samples in _families(status, history):
        known = [(labels, value) for labels, value in samples if value is not None and isfinite(value)]
        if known:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_labels(labels)} {value:.17g}" for labels, value in known]
    return ("\n".join(lines) + "\n").encode()


def _families(status: RunStatus, history: RunHistory) -> Iterator[tuple[str, str, str, Sequence[Sample]]]:
    """Yield name, kind, help and samples of each metric."""
    yield "ravnest_run_info", "gauge", "The run.", [({"run": status.run, "release": status.release}, 1.0)]
    yield "ravnest_run_seconds", "gauge", "Seconds since the start of the run.", [({}, status.uptime_s)]
    yield "ravnest_steps_total", "counter", "Steps that are trained.", [({}, float(status.steps_done))]
    planned = None if status.steps is None else float(status.steps)
    yield "ravnest_steps_planned", "gauge", "Steps of the whole run.", [({}, planned)]
    yield "ravnest_samples_total", "counter", "Samples that are trained.", [({}, float(history.contributions.samples))]
    yield from _losses(history)
    yield from _clusters(status)
    leases = status.leases
    yield "ravnest_leases_total", "counter", "Leases of batches to clusters, by what became of them.", [
        ({"state": "granted"}, float(leases.granted)), ({"state": "settled"}, float(leases.settled)),
        ({"state": "repeated"}, float(leases.repeated)), ({"state": "returned"}, float(leases.returned)),
    ]  # fmt: skip
    yield "ravnest_leases_outstanding", "gauge", "Batches that clusters train.", [({}, float(leases.outstanding))]
    yield "ravnest_rounds_total", "counter", "Rounds of averaging that are done.", [({}, float(status.rounds_done))]
    yield from _nodes(status)
    yield from _stages(status, history)
    rejected = float(status.num_rejected)
    yield "ravnest_connections_rejected_total", "counter", "Connections that were rejected.", [({}, rejected)]


def _losses(history: RunHistory) -> Iterator[tuple[str, str, str, Sequence[Sample]]]:
    """The last values of the loss function; points of a long run are means of a few steps."""
    further: list[Sample] = []
    for name, data, series in (
        ("ravnest_loss", "training", history.steps),
        ("ravnest_validation_loss", "validation", history.evaluations),
    ):
        loss, *others = series.points[-1][_POSITIONS:] if series.points else [None]
        yield name, "gauge", f"The last loss of the {data} data.", [({}, loss)]
        pairs = zip(history.labels[1:], others, strict=False)
        further += [({"name": label, "data": data}, value) for label, value in pairs]
    yield "ravnest_loss_value", "gauge", "Further values of the loss function.", further


def _clusters(status: RunStatus) -> Iterator[tuple[str, str, str, Sequence[Sample]]]:
    training = [cluster for cluster in status.clusters if cluster.phase == "training"]
    labels = [{"cluster": cluster.id} for cluster in training]
    for name, text, values in (
        ("samples_per_second", "Throughput of a cluster.", [cluster.samples_per_s for cluster in training]),
        ("planned_samples_per_second", "Planned throughput.", [cluster.planned_samples_per_s for cluster in training]),
        ("cluster_loss", "Loss of the last step of a cluster.", [cluster.loss for cluster in training]),
        (
            "round_seconds", "Seconds of the last round of averaging.",
            [cluster.averaging.seconds if cluster.averaging else None for cluster in training],
        ),
    ):  # fmt: skip
        yield f"ravnest_{name}", "gauge", text, list(zip(labels, values, strict=True))
    yield "ravnest_clusters", "gauge", "Clusters that train.", [({}, float(len(training)))]


def _nodes(status: RunStatus) -> Iterator[tuple[str, str, str, Sequence[Sample]]]:
    counts = Counter(node.state for node in status.nodes)
    yield "ravnest_nodes", "gauge", "Nodes by state.", [
        ({"state": state}, float(counts[state])) for state in (*_NODE_STATES, *sorted(counts.keys() - {*_NODE_STATES}))
    ]  # fmt: skip
    losses = [({"node": node.name}, float(node.num_losses)) for node in status.nodes]
    yield "ravnest_node_losses_total", "counter", "Times that a node was lost.", losses
    present = [node for node in status.nodes if node.profile is not None and node.state not in ("gone", "kicked")]
    yield "ravnest_node_lent_memory_bytes", "gauge", "Memory that a node lends.", [
        ({"node": node.name}, float(node.profile.memory_bytes)) for node in present
        if node.profile is not None and node.profile.memory_bytes < UNLIMITED_BYTES
    ]  # fmt: skip


def _stages(status: RunStatus, history: RunHistory) -> Iterator[tuple[str, str, str, Sequence[Sample]]]:
    """The counters of stages of clusters that train."""
    found: list[tuple[dict[str, str], StageMetrics]] = []
    for cluster in status.clusters:
        known = history.stages.get(cluster.id, {}) if cluster.phase == "training" else {}
        for stage in cluster.stages:
            if stage.stage in known:
                labels = {"cluster": cluster.id, "stage": str(stage.stage), "node": stage.name}
                found.append((labels, known[stage.stage]))
    for field, text in _STAGE_COUNTERS.items():
        name = next((field.removesuffix(end) + unit for end, unit in _UNITS.items() if field.endswith(end)), field)
        samples = [(labels, float(getattr(metrics, field))) for labels, metrics in found]
        yield f"ravnest_stage_{name}_total", "counter", text, samples
    memory = [(labels, float(metrics.memory_bytes)) for labels, metrics in found]
    yield "ravnest_stage_memory_bytes", "gauge", "Memory that a stage uses.", memory
    yield (
        "ravnest_stage_gradients_total",
        "counter",
        "Applied gradients of a stage, by steps that they were late.",
        [
            ({**labels, "late": str(late)}, float(count))
            for labels, metrics in found
            for late, count in sorted(metrics.staleness.items())
        ],
    )


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(text)}"' for name, text in labels.items()) + "}" if labels else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
