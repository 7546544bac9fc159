"""The rings of the averaging benchmark over home lines, and a lower bound of the time of a round.

Four clusters hold a GPT of 64 MB each. The planner cuts it for PCs of different speeds, so all four have different
cuts; whole-model replicas are the same with one PC per cluster. A node that holds S bytes in rings of C members sends
2 (C - 1) / C S over its line, so with the largest node's S

    seconds of a round >= 2 (C - 1) / C * S / rate

The bytes are those of the parameters alone: encryption, headers and acknowledgements count against the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.planner.fleets import gpt_chain
from ravnest.planner import ClusterPlan, Fleet, Machine, Rings, Task, choose_rings
from ravnest.planner.partition import partition
from testbed import HostSpec, Line, Topology

__all__ = [
    "CLUSTERS",
    "PIECE_ELEMENTS",
    "RATE_BYTES_PER_S",
    "REPLICAS",
    "bound_s",
    "held_bytes",
    "form_rings",
    "topology",
]

CHAIN = gpt_chain(layers=5, width=512, context=256, vocabulary=512)
CLUSTERS: tuple[tuple[float, ...], ...] = ((1.0, 1.2), (1.0, 0.6, 1.0), (1.4, 1.0), (0.8, 1.0, 1.3))
"""The speeds of each cluster's PCs."""
REPLICAS: tuple[tuple[float, ...], ...] = ((1.0,),) * 4
RATE_BYTES_PER_S = 12.5e6  # 100 Mbit/s, up and down
DELAY_S = 0.005  # one way, from any PC to any other
PIECE_ELEMENTS = int(0.05 * RATE_BYTES_PER_S / 4)  # 50 ms of the line, as the coordinator sets it


def form_rings(clusters: Sequence[Sequence[float]]) -> Rings:
    """Cut the model for each cluster, and form a ring for every segment."""
    rows = [
        [_machine(f"pc-{cluster}-{stage}", speed) for stage, speed in enumerate(speeds)]
        for cluster, speeds in enumerate(clusters)
    ]
    task = Task(chain=CHAIN, fleet=Fleet(machines=tuple(pc for row in rows for pc in row)))
    plans = []
    for row in rows:
        cut = partition(task.problem(row))
        plans.append(ClusterPlan(tuple(pc.name for pc in row), cut, 0.0, cut.reason))
    return choose_rings(task, plans)


def _machine(name: str, speed: float) -> Machine:
    return Machine(
        name=name, speed=speed, up_bytes_per_s=RATE_BYTES_PER_S, down_bytes_per_s=RATE_BYTES_PER_S,
        latency_s=DELAY_S / 2,
    )  # fmt: skip


def topology(rings: Rings) -> Topology:
    """A host for every member, each with a line of its own."""
    line = Line(up_bytes_per_s=RATE_BYTES_PER_S, down_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S / 2)
    return Topology(hosts=tuple(HostSpec(name=name, line=line) for name in sorted(rings.sent_bytes)))


def held_bytes(rings: Rings) -> dict[str, int]:
    """The bytes S that each node holds."""
    return {
        name: sum(ring.segment.parameter_bytes for ring in rings.rings if name in ring.members)
        for name in sorted(rings.sent_bytes)
    }


def bound_s(rings: Rings, num_clusters: int) -> float:
    """The lower bound: seconds of the largest node's line."""
    return 2 * (num_clusters - 1) / num_clusters * max(held_bytes(rings).values()) / RATE_BYTES_PER_S
