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
from .chain import Chain, Places, Storage
from .memory import MemoryModel, stage_memory
from .problem import DoesNotFit, Problem

__all__ = ["Room", "does_not_fit", "missing_bytes"]

_FEW_PLACES = 96  # a rough answer is enough
_MORE_NODES = 8


class Room:
    """Which stretches fit on a node: never those that start before `never[k]`, surely those from `sure[k]` on.

    Both bounds take the link buffers for the smallest or largest there are, and so only rise with k; what lies
    between them is computed when it is asked for.
    """

    def __init__(self, places: Places, memory_bytes: float, depth: int, model: MemoryModel) -> None:
        self._places, self._memory_bytes, self._depth, self._model = places, memory_bytes, depth, model
        chain = places.chain
        links = [chain.cut_bytes(b) for b in places.bounds]
        inputs = [chain.forward_bytes[b] for b in places.bounds]
        self.never = self._starts(min(inputs), 2 * min(links))
        self.sure = self._starts(max(inputs), 2 * max(links))

    def fits(self, i: int, k: int) -> bool:
        return stage_memory(self._places.share(i, k), self._depth, self._model).total <= self._memory_bytes

    def _starts(self, input_bytes: int, link_bytes: int) -> list[int]:
        """For every end the first start that fits, if a stage had these inputs and links."""

        def fits(i: int, k: int) -> bool:
            share = self._places.share(i, k)._replace(input_bytes=input_bytes, link_bytes=link_bytes)
            return stage_memory(share, self._depth, self._model).total <= self._memory_bytes

        if fits(0, self._places.end):
            return [0] * (self._places.end + 1)
        starts, i = [0], 0
        for k in range(1, self._places.end + 1):
            while i < k and not fits(i, k):
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
    remedies = tuple(text for text, changed in _changes(problem) if missing_bytes(changed) <= 0)
    places = problem.chain.places(1)
    whole = stage_memory(places.share(0, places.end), 1, problem.memory)
    message = (
        f"the model does not fit on {_nodes(len(problem.nodes))} in this order: up to {format_bytes(missing)} more is "
        f"needed on each (the nodes have {format_bytes(sum(n.memory_bytes for n in problem.nodes))} in all; the whole "
        f"model on one, with one microbatch in flight, takes {whole}). "
    )
    if remedies:
        message += "It would fit " + ", or ".join(remedies) + "."
    else:
        message += (
            f"Neither recomputation nor half the microbatch nor {_MORE_NODES} more nodes like the largest is enough: "
            "give the nodes more memory."
        )
    return DoesNotFit(message, missing, remedies)


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


def _halved(chain: Chain) -> Chain:
    """The chain at half the microbatch, as if everything but weights went with it."""

    def half(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // 2) for size in sizes)

    return replace(
        chain,
        forward_bytes=half(chain.forward_bytes),
        backward_bytes=half(chain.backward_bytes),
        saved=tuple(Storage(-(-s.num_bytes // 2), s.ops) for s in chain.saved),
        work_bytes=half(chain.work_bytes),
    )


def _nodes(count: int) -> str:
    return "one node" if count == 1 else f"{count} nodes"
