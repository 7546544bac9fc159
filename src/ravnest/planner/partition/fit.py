"""Decides which stages fit on a node; if none do, computes the missing memory and changes with which they would fit.

Of a stage's memory only its link buffers, and its inputs if it recomputes, depend on where exactly it is cut; the rest
only grows with the stage. So the rest is cached apart:

    total(i, k) = bare(i, k) + link buffers * bytes over both cuts (+ depth * inputs)

The missing memory is the least x such that x more bytes on every node would do. It is computed like a bottleneck, with
a stage's deficit in place of its seconds:

    deficit_j(k) = min over i < k of max(deficit_{j-1}(i), memory_j(i, k) - memory of node j)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil, inf

from ravnest.core.units import format_bytes
from ravnest.planner.chain import Chain, CutPoints, Storage
from ravnest.planner.memory import MemoryModel, stage_memory
from ravnest.planner.problem import DoesNotFit, Problem
from ravnest.planner.reasons import count, describe_misfit, describe_remedies

__all__ = ["StageMemoryTable", "memory_table", "FitChecker", "does_not_fit", "fleet_does_not_fit", "missing_bytes"]

_MAX_CUT_POINTS = 96  # an estimate is enough
_MORE_NODES = 8


class StageMemoryTable:
    """Bytes of stages between cut points, by the number of microbatches in flight."""

    def __init__(self, cut_points: CutPoints, model: MemoryModel) -> None:
        chain, self.cut_points, self.model = cut_points.chain, cut_points, model
        self.link_bytes = [model.link_buffers * chain.cut_bytes(b) for b in cut_points.bounds]
        self.input_bytes = [chain.forward_bytes[b] if model.recompute else 0 for b in cut_points.bounds]
        self._bare: dict[tuple[int, int, int], int] = {}

    def bare(self, i: int, k: int, depth: int) -> int:
        """Bytes without link buffers and inputs: never less for a longer stage."""
        known = self._bare.get((i, k, depth))
        if known is None:
            share = self.cut_points.share(i, k)._replace(input_bytes=0, link_bytes=0)
            known = self._bare[i, k, depth] = stage_memory(share, depth, self.model).total
        return known

    def total(self, i: int, k: int, depth: int) -> int:
        bare = self.bare(i, k, depth)
        return bare + self.link_bytes[i] + self.link_bytes[k] + depth * self.input_bytes[i]


@lru_cache(maxsize=16)
def memory_table(cut_points: CutPoints, model: MemoryModel) -> StageMemoryTable:
    """The table of these; the last few are cached."""
    return StageMemoryTable(cut_points, model)


class FitChecker:
    """The ranges that fit on a node: none that start before `never[k]`, all from `sure[k]` on.

    Both bounds assume the smallest or largest link buffers, and so only rise with k; the ranges between them are
    computed on demand.
    """

    def __init__(self, needs: StageMemoryTable, memory_bytes: float, depth: int) -> None:
        self._needs, self._memory_bytes, self._depth = needs, memory_bytes, depth
        inputs, links = needs.input_bytes, needs.link_bytes
        self.never = self._starts(depth * min(inputs) + 2 * min(links))
        self.sure = self._starts(depth * max(inputs) + 2 * max(links))

    def fits(self, i: int, k: int) -> bool:
        return self._needs.total(i, k, self._depth) <= self._memory_bytes

    def _starts(self, besides: int) -> list[int]:
        """For every end the first start that fits, if inputs and link buffers took `besides` bytes."""
        bare, depth, room, end = self._needs.bare, self._depth, self._memory_bytes - besides, self._needs.cut_points.end
        if bare(0, end, depth) <= room:
            return [0] * (end + 1)
        starts, i = [0], 0
        for k in range(1, end + 1):
            while i < k and bare(i, k, depth) > room:
                i += 1
            starts.append(i)
        return starts


def missing_bytes(problem: Problem) -> float:
    """Approximate memory that every node needs in addition, for the given depths or one microbatch in flight.

    0 or less: the model fits.
    """
    cut_points = problem.chain.cut_points(max(_MAX_CUT_POINTS, 4 * len(problem.nodes)))
    in_flight = problem.depths or (1,) * len(problem.nodes)
    deficits = [-inf, *[inf] * cut_points.end]
    for j, (node, depth) in enumerate(zip(problem.nodes, in_flight, strict=True)):
        following = [inf] * (cut_points.end + 1)
        last = cut_points.end - (len(problem.nodes) - 1 - j)
        for k in range(j + 1 if last < cut_points.end else cut_points.end, last + 1):
            for i in range(k - 1, j - 1, -1):
                share = cut_points.share(i, k)
                deficit = stage_memory(share, depth, problem.memory).total - node.memory_bytes
                following[k] = min(following[k], max(deficits[i], deficit))
                least = share._replace(input_bytes=0, link_bytes=0)  # of any stage that starts earlier
                if stage_memory(least, depth, problem.memory).total - node.memory_bytes >= following[k]:
                    break
        deficits = following
    return deficits[cut_points.end]


def does_not_fit(problem: Problem) -> DoesNotFit:
    """The error of nodes with too little memory."""
    missing = ceil(missing_bytes(problem))
    message = (
        f"the model does not fit on {count(len(problem.nodes), 'node')} in this order: "
        f"up to {format_bytes(missing)} more is needed on each ({describe_misfit(problem)}). "
    )
    remedies = tuple(text for text, changed in _changes(problem) if missing_bytes(changed) <= 0)
    return DoesNotFit(message + describe_remedies(remedies, _MORE_NODES), missing, remedies)


def fleet_does_not_fit(problem: Problem, num_machines: int) -> DoesNotFit:
    """The error of a fleet with too little memory; `problem` has the machines with the most, largest first."""
    missing = ceil(missing_bytes(problem)) * len(problem.nodes)
    message = (
        f"the model does not fit on this fleet of {count(num_machines, 'node')}: "
        f"with the {count(len(problem.nodes), 'node')} that have the most memory, "
        f"{format_bytes(missing)} in all is missing ({describe_misfit(problem)}). "
    )
    remedies = tuple(text for text, changed in _changes_of_fleet(problem) if missing_bytes(changed) <= 0)
    return DoesNotFit(message + describe_remedies(remedies, _MORE_NODES), missing, remedies)


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Changes that may fit, least costly first; of more and fewer nodes the first number that fits."""
    yield from _changes_of_memory(problem)
    yield "with half the microbatch", replace(problem, chain=_halved(problem.chain))
    if problem.depths is None:
        yield from _first_that_fits(_with_more_nodes(problem))
        yield from _first_that_fits(_with_fewer_nodes(problem))
    elif max(problem.depths) > 1:
        yield "with one microbatch in flight per stage (slower)", replace(problem, depths=(1,) * len(problem.nodes))


def _changes_of_fleet(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Changes that may fit if no choice of machines is enough."""
    yield from _changes_of_memory(problem)
    yield "with half the microbatch", replace(problem, chain=_halved(problem.chain))
    yield "with half the bytes per number (bf16 for fp32)", replace(problem, chain=_halved(problem.chain, weights=True))
    yield from _first_that_fits(_with_more_nodes(problem))


def _changes_of_memory(problem: Problem) -> Iterator[tuple[str, Problem]]:
    memory = problem.memory
    if memory.mode == "exact" and not memory.synchronous:
        yield "with memory mode compact", replace(problem, memory=memory.in_mode("compact"))
    if not memory.recompute:
        yield "with recomputation", replace(problem, memory=replace(memory, recompute=True))
    if memory.mode != "small":
        yield "with memory mode small (slower)", replace(problem, memory=memory.in_mode("small"))


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
        text = f"with {count(extra, 'more node')} of {format_bytes(largest.memory_bytes)}"
        yield text, replace(problem, nodes=nodes, links=())


def _with_fewer_nodes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    nodes = problem.nodes
    for left_out in range(1, len(problem.nodes)):
        smallest = min(range(len(nodes)), key=lambda j: nodes[j].memory_bytes)
        nodes = nodes[:smallest] + nodes[smallest + 1 :]
        text = f"without the {'smallest node' if left_out == 1 else f'{left_out} smallest nodes'}"
        yield text, replace(problem, nodes=nodes, links=())


def _halved(chain: Chain, *, weights: bool = False) -> Chain:
    """The chain with half of everything but weights, as with half the microbatch; or half of everything."""

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
