"""Models how long everything takes in a cluster: the actions of its stages, and messages over lines and links.

A machine's upload is one channel and its download another, shared by all its links. A link that is slower than both
ends' lines, or uses none (the network of a site), or is not duplex, is a channel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple, TypeAlias

from ravnest.core.schedule import Kind
from ravnest.planner.chain import Chain, CutPoints
from ravnest.planner.fleet import ClusterPlan, Machine, Task
from ravnest.planner.memory import StageShare
from ravnest.planner.problem import LinkSpec
from ravnest.simulator.pipeline import Hop, Route

__all__ = ["StepSeconds", "NetworkModel", "ClusterLinks", "cluster_links"]

StepSeconds: TypeAlias = float | Callable[[Machine, StageShare], float]  # of an optimizer step


class ClusterLinks(NamedTuple):
    """Routes of a `PipelineSimulation`, the bytes of a message on each, and the names of the channels they pass."""

    routes: tuple[Route, ...]
    num_bytes: tuple[int, ...]
    channels: tuple[str, ...]


class NetworkModel:
    """A chain with prefix sums, for quick answers about ranges of ops."""

    def __init__(self, chain: Chain, cuts: Iterable[int] = (), *, recompute: bool = False) -> None:
        """`cuts` are those expected in plans; a new one costs another pass over the chain."""
        self.chain, self._recompute = chain, recompute
        self._forward_s = list(accumulate(chain.forward_s, initial=0.0))
        self._backward_s = list(accumulate(chain.backward_s, initial=0.0))
        self._cuts = set(cuts)
        self._index_cuts()

    def _index_cuts(self) -> None:
        self._cut_points = CutPoints(self.chain, sorted(self._cuts))
        self._index = {op: i for i, op in enumerate(self._cut_points.bounds)}

    def share(self, start: int, stop: int) -> StageShare:
        """The bytes of the stage from op `start` up to `stop`."""
        if start not in self._index or stop not in self._index:
            self._cuts |= {start, stop} - {0, self.chain.num_ops}
            self._index_cuts()
        return self._cut_points.share(self._index[start], self._index[stop])

    def action_seconds(self, start: int, stop: int, machine: Machine, step_s: StepSeconds) -> Mapping[Kind, float]:
        """Seconds of each action of that stage."""
        forward_s = (self._forward_s[stop] - self._forward_s[start]) / machine.speed
        backward_s = (self._backward_s[stop] - self._backward_s[start]) / machine.speed
        return {
            "forward": forward_s,
            "backward": backward_s + (forward_s if self._recompute else 0.0),
            "step": step_s if isinstance(step_s, int | float) else step_s(machine, self.share(start, stop)),
        }

    def op_ranges(self, plan: ClusterPlan) -> list[tuple[int, int]]:
        return list(pairwise((0, *plan.partition.cuts, self.chain.num_ops)))


def cluster_links(task: Task, plan: ClusterPlan) -> ClusterLinks:
    """The routes of a cluster's messages: forward from stage j, and backward to it."""
    machines = [task.fleet[name] for name in plan.members]
    channels = _Channels()
    routes, sizes = list[Route](), list[int]()
    for (a, b), cut in zip(pairwise(machines), plan.partition.cuts, strict=True):
        link = task.fleet.link(a, b)
        there, back = task.chain.forward_bytes[cut], task.chain.backward_bytes[cut]
        routes.append(channels.route(a, b, link, link.forward_bytes_per_s, there))
        routes.append(channels.route(b, a, link, link.backward_bytes_per_s, back))
        sizes += [there, back]
    return ClusterLinks(tuple(routes), tuple(sizes), tuple(channels.numbers))


class _Channels:
    """Channels by name, numbered as they appear."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def route(self, a: Machine, b: Machine, link: LinkSpec, bytes_per_s: float, num_bytes: int) -> Route:
        up, down = (a.up_bytes_per_s, b.down_bytes_per_s) if link.uses_line else (inf, inf)
        hops = [self._hop(f"{a.name} up", num_bytes / up)]
        if bytes_per_s < min(up, down) or not link.duplex:
            name = f"{a.name} > {b.name}" if link.duplex else " - ".join(sorted((a.name, b.name)))
            hops.append(self._hop(name, num_bytes / bytes_per_s))
        hops.append(self._hop(f"{b.name} down", num_bytes / down))
        return Route(tuple(hop for hop in hops if hop.seconds), link.latency_s)

    def _hop(self, name: str, seconds: float) -> Hop:
        return Hop(self.numbers.setdefault(name, len(self.numbers)) if seconds else -1, seconds)
