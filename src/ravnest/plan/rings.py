"""Who averages what with whom: a ring per segment, of its owners in all clusters, and what a round costs.

A ring of C members passes on 1/C of its segment at a time: C - 1 steps to add up, C - 1 to hand the sums round. All
rings run at once, so a machine that owns several segments sends for several rings over its one line:

    bytes(machine) = sum over its rings of  2 (C - 1) / C * segment bytes
    round          = max over machines of  bytes over its line / line,
                     max over rings of     2 (C - 1) * (latency + segment bytes / (C * slowest link))

Bytes are those of the parameters as they are; a codec makes them fewer. With one cluster there is nothing to average.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..core.config import format_bytes
from .fleet import ClusterPlan, Fleet, Machine, Task
from .problem import Link
from .ring_order import order_ring
from .segments import Segment, find_segments

__all__ = ["Ring", "Rings", "choose_rings"]


@dataclass(frozen=True)
class Ring:
    """A segment's owners by name, each sending to the next and the last to the first; its slowest link.

    `seconds` is what a round takes if this ring has the lines to itself.
    """

    segment: Segment
    members: tuple[str, ...]
    bytes_per_s: float
    latency_s: float
    seconds: float


@dataclass(frozen=True)
class Rings:
    """All rings; what each member of a cluster sends in a round; a bound on the time of a round, and what sets it."""

    rings: tuple[Ring, ...]
    sent_bytes: Mapping[str, float]
    round_s: float
    reason: str


def choose_rings(task: Task, clusters: Sequence[ClusterPlan]) -> Rings:
    """A ring for every segment that has parameters."""
    sent_bytes = {name: 0.0 for cluster in clusters for name in cluster.members}
    if len(clusters) < 2:
        return Rings((), sent_bytes, 0.0, "one cluster: there is nothing to average")
    loads = _Loads(task.fleet)
    rings = []
    for segment in find_segments(task.chain, [cluster.partition.cuts for cluster in clusters]):
        if segment.parameter_bytes:
            owners = [cluster.members[stage] for cluster, stage in zip(clusters, segment.owners, strict=True)]
            rings.append(_ring(task.fleet, segment, owners, loads))
    return Rings(tuple(rings), sent_bytes | loads.sent_bytes, *_round(rings, loads, len(clusters)))


def _ring(fleet: Fleet, segment: Segment, owners: Sequence[str], loads: _Loads) -> Ring:
    machines = order_ring([fleet[name] for name in owners])
    steps, piece_bytes = 2 * (len(machines) - 1), segment.parameter_bytes / len(machines)
    slowest, latency_s = float("inf"), 0.0
    for sender, receiver in zip(machines, (*machines[1:], machines[0]), strict=True):
        link = loads.add(sender, receiver, steps * piece_bytes)
        slowest, latency_s = min(slowest, link.forward_bytes_per_s), max(latency_s, link.latency_s)
    seconds = steps * (latency_s + piece_bytes / slowest)
    return Ring(segment, tuple(m.name for m in machines), slowest, latency_s, seconds)


class _Loads:
    """What all rings together put on each machine's line."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._links: dict[tuple[str, str], Link] = {}
        self.sent_bytes: defaultdict[str, float] = defaultdict(float)
        self._up: defaultdict[str, float] = defaultdict(float)
        self._down: defaultdict[str, float] = defaultdict(float)

    def add(self, sender: Machine, receiver: Machine, num_bytes: float) -> Link:
        pair = sender.name, receiver.name
        link = self._links.get(pair) or self._fleet.link(sender, receiver)
        self._links[pair] = link
        self.sent_bytes[sender.name] += num_bytes
        if link.uses_line:
            self._up[sender.name] += num_bytes
            self._down[receiver.name] += num_bytes
        return link

    def lines(self) -> Iterator[tuple[float, str]]:
        """Seconds that each line takes, and which it is."""
        for name, num_bytes in self._up.items():
            yield num_bytes / self._fleet[name].up_bytes_per_s, f"the upload of {name}, {format_bytes(num_bytes)}"
        for name, num_bytes in self._down.items():
            yield num_bytes / self._fleet[name].down_bytes_per_s, f"the download of {name}, {format_bytes(num_bytes)}"


def _round(rings: Sequence[Ring], loads: _Loads, num_clusters: int) -> tuple[float, str]:
    """The bound on a round, and what sets it."""
    if not rings:
        return 0.0, "no parameters: there is nothing to average"
    alone_s = max(ring.seconds for ring in rings)
    line_s, line = max(loads.lines(), default=(0.0, ""))
    what = f"{len(rings)} {'ring' if len(rings) == 1 else 'rings'} of {num_clusters}"
    if line_s >= alone_s and line:
        return line_s, f"{what}: {line}, is the longest part of a round, {line_s:.3g} s"
    slowest = max(rings, key=lambda ring: ring.seconds)
    size = format_bytes(slowest.segment.parameter_bytes)
    text = f"{what}: the ring of ops {slowest.segment.start} to {slowest.segment.stop}, {size}, is the slowest"
    return alone_s, f"{text}, {alone_s:.3g} s a round"
