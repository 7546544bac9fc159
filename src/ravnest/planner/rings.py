"""Chooses the rings in which clusters average, the cost of a round, and the compression of averages.

**Segments** are the parts that clusters with different cuts have in common: the ranges between all of their cuts.

    bounds = 0, the union of all clusters' cuts, the end          segment s = ops [bounds[s], bounds[s + 1])

No cluster cuts inside a segment, so it has exactly one owner in each: the stage it lies in. There is one ring per
segment, of its owners. A parameter belongs to the segment of its first op, as it belongs to the stage of its first op;
a stage that borrows a tied parameter does not average it. So segments divide the parameters, and all owners of a
segment hold the same ones. A segment without parameters is kept, so that segments cover the program, but it has no
ring.

**Cost.** A ring of C members passes on 1/C of its segment at a time: C - 1 steps to reduce, C - 1 to gather. All rings
run at once, so a machine that owns several segments sends for several rings over its one line:

    bytes(machine) = sum over its rings of  2 (C - 1) / C * segment bytes
    round          = max over machines of  bytes over its line / line,
                     max over rings of     2 (C - 1) * (latency + segment bytes / (C * slowest link))

Bytes are those of the parameters without compression. With one cluster there is nothing to average.

**Order** in a ring: the best slowest link, then the least latency, for rings of any length. Each member sends to the
next and receives from the previous one. Over lines alone that is each upload and each download, in any order; only
neighbours of one site, over its network, do not use their lines. So the best order keeps a site together, and of its
lines uses one to enter and one to leave:

    slowest = min(site networks in use, over sites of  max over entry != exit of  min(down(entry), up(exit)))

Any other order uses more lines than these, so it is exact if a site's network is no slower than the slowest line.
Regions are kept together too, since every step into another one costs its latency; the latency of a line counts the
same in any order. So latency is the least too, if a site lies in one region and its network has the lower latency.

**Codec** (`choose_codec`), if the user does not choose one: as exact as the lines allow.

    seconds(codec) = bytes of the busiest line * ratio(codec) / its rate       ratio = 1 (fp32), 1/2 (bf16), 1/4 (int8)

Training continues while clusters average, but a slow average is of old weights, and its bytes share the lines with
those of the pipeline. So the most exact codec is chosen with which a round takes at most half of the time from one
round to the next. Before the first round its bytes are unknown, and the line's rate alone decides. Processor time does
not matter: one core encodes and decodes 2.3 GB/s of float32 as int8, and has fewer bytes to encrypt then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import inf, isfinite
from typing import NamedTuple

from ravnest.core.config import require
from ravnest.core.units import format_bytes
from ravnest.planner.chain import Chain
from ravnest.planner.fleet import ClusterPlan, Fleet, Machine, Task
from ravnest.planner.problem import LinkSpec
from ravnest.planner.reasons import explain_rings

__all__ = ["Segment", "find_segments", "order_ring", "Ring", "Rings", "choose_rings", "LineLoad", "choose_codec"]


@dataclass(frozen=True)
class Segment:
    """Ops from `start` up to `stop`, the stage that has them in each cluster, and which of `chain.weights` they own."""

    start: int
    stop: int
    owners: tuple[int, ...]
    weights: tuple[int, ...]
    parameter_bytes: int


def find_segments(chain: Chain, cuts: Sequence[Sequence[int]]) -> tuple[Segment, ...]:
    """The common refinement of the cuts of each cluster."""
    require(len(cuts) >= 1, "cuts must have one entry per cluster, got none")
    legal = set(chain.cuts)
    for number, own in enumerate(cuts):
        require(all(a < b for a, b in pairwise(own)), f"cuts must be ascending, cluster {number} has {tuple(own)}")
        require(legal.issuperset(own), f"cluster {number} has cuts that the chain does not allow: {tuple(own)}")
    bounds = [0, *sorted({cut for own in cuts for cut in own}), chain.num_ops]
    weights = _weights_within(chain, bounds)
    return tuple(
        Segment(start, stop, owners, held, sum(chain.weights[w].num_bytes for w in held))
        for (start, stop), owners, held in zip(pairwise(bounds), _owners_within(bounds, cuts), weights, strict=True)
    )


def _weights_within(chain: Chain, bounds: Sequence[int]) -> list[tuple[int, ...]]:
    held: list[list[int]] = [[] for _ in bounds[1:]]
    for index, storage in enumerate(chain.weights):
        if storage.ops:
            held[bisect_right(bounds, min(storage.ops)) - 1].append(index)
    return [tuple(indices) for indices in held]


def _owners_within(bounds: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Along the chain a cluster proceeds to its next stage at each of its cuts."""
    proceeding: dict[int, list[int]] = {bound: [] for bound in bounds}
    for cluster, own in enumerate(cuts):
        for cut in own:
            proceeding[cut].append(cluster)
    stages, owners = [0] * len(cuts), []
    for bound in bounds[:-1]:
        for cluster in proceeding[bound]:
            stages[cluster] += 1
        owners.append(tuple(stages))
    return owners


Cost = Callable[[Machine], float]
Group = Sequence[Machine]


def order_ring(machines: Sequence[Machine]) -> tuple[Machine, ...]:
    """The machines in the order in which each sends to the next, and the last to the first."""
    home = {m.site: m.region for m in machines if m.site}
    placed = sorted(machines, key=lambda m: (home.get(m.site, m.region), m.site, m.name))
    if len(home) == sum(m.site != "" for m in machines):
        return tuple(placed)  # no site has two machines
    groups = [group for site, members in groupby(placed, lambda m: m.site) for group in _groups(site, members)]
    if len(groups) == 1:
        return tuple(placed)
    least = min(map(_best_bytes_per_s, groups))
    return tuple(machine for group in groups for machine in _path(group, least))


def _groups(site: str, members: Iterable[Machine]) -> list[Group]:
    """Machines that reach each other without their lines; one without a site is alone."""
    return [tuple(members)] if site else [(machine,) for machine in members]


def _best_bytes_per_s(group: Group) -> float:
    """The rate of the slower of the two lines in use."""
    if len(group) == 1:
        return min(group[0].down_bytes_per_s, group[0].up_bytes_per_s)
    entry, leave = _ends(group, lambda m: -m.down_bytes_per_s, lambda m: -m.up_bytes_per_s, max)
    return min(entry.down_bytes_per_s, leave.up_bytes_per_s)


def _path(group: Group, least_bytes_per_s: float) -> Group:
    """From entry to exit: of the lines that are fast enough, those of least latency."""
    if len(group) == 1:
        return group
    entry, leave = _ends(
        group,
        lambda m: m.latency_s if m.down_bytes_per_s >= least_bytes_per_s else inf,
        lambda m: m.latency_s if m.up_bytes_per_s >= least_bytes_per_s else inf,
        sum,
    )
    return (entry, *(m for m in group if m is not entry and m is not leave), leave)


def _ends(
    group: Group, entry_cost: Cost, exit_cost: Cost, both: Callable[[tuple[float, float]], float]
) -> tuple[Machine, Machine]:
    """Two machines to enter and to leave by, at the least cost of both.

    The two best of either kind are enough to choose from, since the other kind takes only one.
    """
    entries, exits = sorted(group, key=entry_cost)[:2], sorted(group, key=exit_cost)[:2]
    pairs = [(entry, leave) for entry in entries for leave in exits if entry is not leave]
    return min(pairs, key=lambda pair: both((entry_cost(pair[0]), exit_cost(pair[1]))))


@dataclass(frozen=True)
class Ring:
    """The owners of a segment by name, each sending to the next and the last to the first; its slowest link.

    `seconds` is the time of a round if this ring has the lines to itself.
    """

    segment: Segment
    members: tuple[str, ...]
    bytes_per_s: float
    latency_s: float
    seconds: float


@dataclass(frozen=True)
class Rings:
    """All rings, the bytes that each machine sends in a round, and a lower bound on its time with the reason."""

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
    steps, chunk_bytes = 2 * (len(machines) - 1), segment.parameter_bytes / len(machines)
    slowest, latency_s = float("inf"), 0.0
    for sender, receiver in zip(machines, (*machines[1:], machines[0]), strict=True):
        link = loads.add(sender, receiver, steps * chunk_bytes)
        slowest, latency_s = min(slowest, link.forward_bytes_per_s), max(latency_s, link.latency_s)
    seconds = steps * (latency_s + chunk_bytes / slowest)
    return Ring(segment, tuple(m.name for m in machines), slowest, latency_s, seconds)


class _Loads:
    """Bytes of all rings together on each machine's line."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._links: dict[tuple[str, str], LinkSpec] = {}
        self.sent_bytes: defaultdict[str, float] = defaultdict(float)
        self._up: defaultdict[str, float] = defaultdict(float)
        self._down: defaultdict[str, float] = defaultdict(float)

    def add(self, sender: Machine, receiver: Machine, num_bytes: float) -> LinkSpec:
        pair = sender.name, receiver.name
        link = self._links.get(pair) or self._fleet.link(sender, receiver)
        self._links[pair] = link
        self.sent_bytes[sender.name] += num_bytes
        if link.uses_line:
            self._up[sender.name] += num_bytes
            self._down[receiver.name] += num_bytes
        return link

    def lines(self) -> Iterator[tuple[float, str]]:
        """Seconds of each line, and its name."""
        for name, num_bytes in self._up.items():
            yield num_bytes / self._fleet[name].up_bytes_per_s, f"the upload of {name}, {format_bytes(num_bytes)}"
        for name, num_bytes in self._down.items():
            yield num_bytes / self._fleet[name].down_bytes_per_s, f"the download of {name}, {format_bytes(num_bytes)}"


def _round(rings: Sequence[Ring], loads: _Loads, num_clusters: int) -> tuple[float, str]:
    """The bound on a round, and its reason."""
    line_s, line = max(loads.lines(), default=(0.0, ""))
    slowest_s = max((ring.seconds for ring in rings), default=0.0)
    return max(line_s, slowest_s), explain_rings(rings, num_clusters, line, line_s)


# The codec of averages.

RATIOS = {"fp32": 1.0, "bf16": 0.5, "int8": 0.254}  # to the bytes of float32, the most exact first
MAX_BUSY = 0.5  # of the time between two rounds
FAST_BYTES_PER_S, SLOW_BYTES_PER_S = 100e6, 12.5e6  # a gigabit a second with room to spare; a home line


class LineLoad(NamedTuple):
    """The upload rate of a node, and the bytes it sends in a round as float32, if known."""

    bytes_per_s: float
    num_bytes: float | None = None


class CodecChoice(NamedTuple):
    codec: str
    reason: str


def choose_codec(lines: Iterable[LineLoad], between_s: float | None = None) -> CodecChoice:
    """The codec of the next round, for nodes with these lines; `between_s` is from one round to the next."""
    lines = list(lines)
    require(all(line.bytes_per_s > 0 for line in lines), "bytes_per_s must be > 0")
    require(between_s is None or between_s > 0, f"between_s must be > 0, got {between_s}")
    if not lines:
        return CodecChoice("fp32", "no nodes average")
    loads_s = [line.num_bytes / line.bytes_per_s for line in lines if line.num_bytes is not None]
    if between_s is None or not isfinite(between_s) or len(loads_s) < len(lines):
        return _by_rate(min(line.bytes_per_s for line in lines))
    return _by_time(max(loads_s), between_s)


def _by_rate(slowest: float) -> CodecChoice:
    rate = f"the slowest line carries {format_bytes(slowest)}/s, and no round has been measured yet"
    if slowest >= FAST_BYTES_PER_S:
        return CodecChoice("fp32", rate)
    return CodecChoice("bf16" if slowest > SLOW_BYTES_PER_S else "int8", rate)


def _by_time(line_s: float, between_s: float) -> CodecChoice:
    """The most exact that is done in time, else the smallest."""
    allowed_s = MAX_BUSY * between_s
    for codec, ratio in RATIOS.items():
        if line_s * ratio <= allowed_s:
            return CodecChoice(codec, f"a round takes {line_s * ratio:.2g} s of the {between_s:.3g} s to the next")
    codec, ratio = list(RATIOS.items())[-1]
    return CodecChoice(codec, f"a round still takes {line_s * ratio:.2g} s of the {between_s:.3g} s to the next")
