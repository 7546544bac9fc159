"""What fits on a node; and if nothing does, how much memory is missing and what would do instead.

What is missing is the least x such that x more bytes on every node would do. It is found as a bottleneck is, with a
stage's want in place of its seconds:

    want_j(k) = min over i < k of max(want_{j-1}(i), memory_j(i, k) - memory of node j)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf

from ..core.config import format_bytes
from .chain import Chain, Storage
from .memory import stage_memory
from .needs import Needs
from .problem import DoesNotFit, Problem

__all__ = ["Room", "does_not_fit", "fleet_does_not_fit", "missing_bytes"]

_FEW_PLACES = 96  # a rough answer is enough
_MORE_NODES = 8


class Room:
    """Which stretches fit on a node: never those that start before `never[k]`, surely those from `sure[k]` on.

    Both bounds take the link buffers for the smallest or largest there are, and so only rise with k; what lies
    between them is computed when it is asked for.
    """

    def __init__(self, needs: Needs, memory_bytes: float, depth: int) -> None:
        self._needs, self._memory_bytes, self._depth = needs, memory_bytes, depth
        inputs, links = needs.input_bytes, needs.link_bytes
        self.never = self._starts(depth * min(inputs) + 2 * min(links))
        self.sure = self._starts(depth * max(inputs) + 2 * max(links))

    def fits(self, i: int, k: int) -> bool:
        return self._needs.total(i, k, self._depth) <= self._memory_bytes

    def _starts(self, besides: int) -> list[int]:
        """For every end the first start that fits, if inputs and link buffers took so many bytes."""
        bare, depth, room, end = self._needs.bare, self._depth, self._memory_bytes - besides, self._needs.places.end
        if bare(0, end, depth) <= room:
            return [0] * (end + 1)
        starts, i = [0], 0
        for k in range(1, end + 1):
            while i < k and bare(i, k, depth) > room:
                i += 1
            starts.append(i)
        return starts


def missing_bytes(problem: Problem) -> float:
    """How much more memory every node would need, about; 0 or less if it fits as it is.

    That is for the depths that are given, or for one microbatch in flight.
    """
    places = problem.chain.places(max(_FEW_PLACES, 4 * len(problem.nodes)))
    in_flight = problem.depths or (1,) * len(problem.nodes)
    wants = [-inf, *[inf] * places.end]
    for j, (node, depth) in enumerate(zip(problem.nodes, in_flight, strict=True)):
        following = [inf] * (places.end + 1)
        last = places.end - (len(problem.nodes) - 1 - j)
        for k in range(j + 1 if last < places.end else places.end, last + 1):
            for i in range(k - 1, j - 1, -1):
                share = places.share(i, k)
                want = stage_memory(share, depth, problem.memory).total - node.memory_bytes
                following[k] = min(following[k], max(wants[i], want))
                least = share._replace(input_bytes=0, link_bytes=0)  # of any stage that starts earlier
                if stage_memory(least, depth, problem.memory).total - node.memory_bytes >= following[k]:
                    break
        wants = following
    return wants[places.end]


def does_not_fit(problem: Problem) -> DoesNotFit:
    """The error for a problem that has no answer for want of memory."""
    missing = ceil(missing_bytes(problem))
    message = (
        f"the model does not fit on {_nodes(len(problem.nodes))} in this order: up to {format_bytes(missing)} more is "
        f"needed on each ({_needs(problem)}). "
    )
    remedies = tuple(text for text, changed in _changes(problem) if missing_bytes(changed) <= 0)
    return DoesNotFit(message + _would_fit(remedies), missing, remedies)


def fleet_does_not_fit(problem: Problem, num_machines: int) -> DoesNotFit:
    """The error if no cluster can be formed; `problem` is that of the machines with the most memory, largest first."""
    missing = ceil(missing_bytes(problem)) * len(problem.nodes)
    message = (
        f"the model does not fit on this fleet of {_nodes(num_machines)}: with the {_nodes(len(problem.nodes))} that "
        f"have the most memory, {format_bytes(missing)} in all is missing ({_needs(problem)}). "
    )
    remedies = tuple(text for text, changed in _changes_of_fleet(problem) if missing_bytes(changed) <= 0)
    return DoesNotFit(message + _would_fit(remedies), missing, remedies)


def _needs(problem: Problem) -> str:
    places = problem.chain.places(1)
    whole = stage_memory(places.share(0, places.end), 1, problem.memory)
    return (
        f"the nodes have {format_bytes(sum(n.memory_bytes for n in problem.nodes))} in all; the whole model on one, "
        f"with one microbatch in flight, takes {whole}"
    )


def _would_fit(remedies: tuple[str, ...]) -> str:
    if remedies:
        return "It would fit " + ", or ".join(remedies) + "."
    return (
        f"Neither recomputation nor half the microbatch nor {_MORE_NODES} more nodes like the largest is enough: "
        "give the nodes more memory."
    )


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """What one could do, least costly first; of more and fewer nodes the first number that fits."""
    if not problem.memory.recompute:
        yield "with recomputation", replace(problem, memory=replace(problem.memory, recompute=True))
    yield "with half the microbatch", replace(problem, chain=_halved(problem.chain))
    if problem.depths is None:
        yield from _first_that_fits(_with_more_nodes(problem))
        yield from _first_that_fits(_with_fewer_nodes(problem))
    elif max(problem.depths) > 1:
        yield "with one microbatch in flight per stage (slower)", replace(problem, depths=(1,) * len(problem.nodes))


def _changes_of_fleet(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """What one could do if no choice of machines is enough."""
    if not problem.memory.recompute:
        yield "with recomputation", replace(problem, memory=replace(problem.memory, recompute=True))
    yield "with half the microbatch", replace(problem, chain=_halved(problem.chain))
    yield "with half the bytes per number (bf16 for fp32)", replace(problem, chain=_halved(problem.chain, weights=True))
    yield from _first_that_fits(_with_more_nodes(problem))


def _first_that_fits(changes: Iterator[tuple[str, Problem]]) -> Iterator[tuple[str, Problem]]:
    for text, changed in changes:
        if missing_bytes(changed) <= 0:
            yield text, changed
            return


def _with_more_nodes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    largest = max(problem.nodes, key=lambda node: node.memory_bytes)
    room = len(problem.chain.cuts) + 1 - len(problem.nodes)
    for extra in range(1, min(_MORE_NODES, room) + 1):
        nodes = (*problem.nodes, *[largest] * extra)
        text = f"with {extra} more {'node' if extra == 1 else 'nodes'} of {format_bytes(largest.memory_bytes)}"
        yield text, replace(problem, nodes=nodes, links=())


def _with_fewer_nodes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    nodes = problem.nodes
    for left_out in range(1, len(problem.nodes)):
        smallest = min(range(len(nodes)), key=lambda j: nodes[j].memory_bytes)
        nodes = nodes[:smallest] + nodes[smallest + 1 :]
        text = f"without the {'smallest node' if left_out == 1 else f'{left_out} smallest nodes'}"
        yield text, replace(problem, nodes=nodes, links=())


def _halved(chain: Chain, *, weights: bool = False) -> Chain:
    """The chain at half the microbatch, as if everything but weights went with it; or half of everything."""

    def half(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // 2) for size in sizes)

    def half_of_each(storages: tuple[Storage, ...]) -> tuple[Storage, ...]:
        return tuple(Storage(-(-s.num_bytes // 2), s.ops) for s in storages)

    return replace(
        chain,
        forward_bytes=half(chain.forward_bytes),
        backward_bytes=half(chain.backward_bytes),
        weights=half_of_each(chain.weights) if weights else chain.weights,
        fixed=half_of_each(chain.fixed) if weights else chain.fixed,
        saved=half_of_each(chain.saved),
        work_bytes=half(chain.work_bytes),
    )


def _nodes(count: int) -> str:
    return "one node" if count == 1 else f"{count} nodes"
