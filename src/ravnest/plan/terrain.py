"""How long what takes in a cluster: the seconds of its stages, and the routes of its messages over lines and links.

A machine's upload is one channel and its download another, whoever it talks to. A link that is slower than both ends'
lines, or uses none (the network of a site), or on which the two ways take turns, is a channel of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple, TypeAlias

from ..core.schedule import Kind
from .chain import Chain, Places
from .fleet import ClusterPlan, Machine, Task
from .memory import Share
from .pipe import Hop, Route
from .problem import Link

__all__ = ["StepSeconds", "Terrain", "Wiring", "wire"]

StepSeconds: TypeAlias = float | Callable[[Machine, Share], float]  # of an update, on this machine, of this share


class Wiring(NamedTuple):
    """Routes as a `Pipe` takes them, the bytes of a message on each, and the names of the channels they pass."""

    routes: tuple[Route, ...]
    num_bytes: tuple[int, ...]
    channels: tuple[str, ...]


class Terrain:
    """A chain with its sums, asked for stretches of ops."""

    def __init__(self, chain: Chain, cuts: Iterable[int] = (), *, recompute: bool = False) -> None:
        """`cuts` are those it will be asked about; others cost more."""
        self.chain, self._recompute = chain, recompute
        self._forward_s = list(accumulate(chain.forward_s, initial=0.0))
        self._backward_s = list(accumulate(chain.backward_s, initial=0.0))
        self._cuts = set(cuts)
        self._survey()

    def _survey(self) -> None:
        self._places = Places(self.chain, sorted(self._cuts))
        self._index = {op: i for i, op in enumerate(self._places.bounds)}

    def share(self, start: int, stop: int) -> Share:
        """What the stage from op `start` up to `stop` consists of."""
        if start not in self._index or stop not in self._index:
            self._cuts |= {start, stop} - {0, self.chain.num_ops}
            self._survey()
        return self._places.share(self._index[start], self._index[stop])

    def seconds(self, start: int, stop: int, machine: Machine, step_s: StepSeconds) -> Mapping[Kind, float]:
        """How long that stage takes for each action."""
        forward_s = (self._forward_s[stop] - self._forward_s[start]) / machine.speed
        backward_s = (self._backward_s[stop] - self._backward_s[start]) / machine.speed
        return {
            "forward": forward_s,
            "backward": backward_s + (forward_s if self._recompute else 0.0),
            "step": step_s if isinstance(step_s, int | float) else step_s(machine, self.share(start, stop)),
        }

    def stretches(self, plan: ClusterPlan) -> list[tuple[int, int]]:
        return list(pairwise((0, *plan.partition.cuts, self.chain.num_ops)))


def wire(task: Task, plan: ClusterPlan) -> Wiring:
    """The messages of a cluster's links: forward from stage j, and back to it."""
    machines = [task.fleet[name] for name in plan.members]
    channels = _Channels()
    routes, sizes = list[Route](), list[int]()
    for (a, b), cut in zip(pairwise(machines), plan.partition.cuts, strict=True):
        link = task.fleet.link(a, b)
        there, back = task.chain.forward_bytes[cut], task.chain.backward_bytes[cut]
        routes.append(channels.route(a, b, link, link.forward_bytes_per_s, there))
        routes.append(channels.route(b, a, link, link.backward_bytes_per_s, back))
        sizes += [there, back]
    return Wiring(tuple(routes), tuple(sizes), tuple(channels.numbers))


class _Channels:
    """Channels by name, numbered as they appear."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def route(self, a: Machine, b: Machine, link: Link, bytes_per_s: float, num_bytes: int) -> Route:
        up, down = (a.up_bytes_per_s, b.down_bytes_per_s) if link.uses_line else (inf, inf)
        hops = [self._hop(f"{a.name} up", num_bytes / up)]
        if bytes_per_s < min(up, down) or not link.duplex:
            name = f"{a.name} > {b.name}" if link.duplex else " - ".join(sorted((a.name, b.name)))
            hops.append(self._hop(name, num_bytes / bytes_per_s))
        hops.append(self._hop(f"{b.name} down", num_bytes / down))
        return Route(tuple(hop for hop in hops if hop.seconds), link.latency_s)

    def _hop(self, name: str, seconds: float) -> Hop:
        return Hop(self.numbers.setdefault(name, len(self.numbers)) if seconds else -1, seconds)
