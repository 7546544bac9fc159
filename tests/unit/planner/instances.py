"""Small random problems, and what is right about them by looking at every possibility."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import inf

from hypothesis import strategies as st

from ravnest.planner import Chain, LinkSpec, MemoryModel, Node, Problem, StageShare, Storage, stage_memory

Stretch = tuple[int, int]


@st.composite
def chains(draw: st.DrawFn, max_ops: int = 12, max_cuts: int = 8) -> Chain:
    num = draw(st.integers(4, max_ops) | st.integers(1, 3))
    seconds = st.integers(0, 20).map(lambda n: n / 8)
    sizes = st.integers(0, 50)
    storages = st.lists(
        st.builds(Storage, sizes, st.lists(st.integers(0, num - 1), min_size=1, max_size=4, unique=True).map(tuple)),
        max_size=6,
    ).map(tuple)

    def of_each(values: st.SearchStrategy[int], count: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(values, min_size=count, max_size=count).map(tuple)

    times = st.lists(seconds, min_size=num, max_size=num).map(tuple)
    barred = draw(st.sets(st.integers(1, max_ops), max_size=3))
    cuts = [c for c in range(1, num) if c not in barred][:max_cuts]
    return Chain(
        forward_s=draw(times),
        backward_s=draw(times),
        cuts=tuple(cuts),
        forward_bytes=draw(of_each(sizes, num + 1)),
        backward_bytes=draw(of_each(sizes, num + 1)),
        weights=draw(storages),
        fixed=draw(storages),
        saved=draw(storages),
        work_bytes=draw(st.one_of(st.just(()), of_each(sizes, num))),
    )


models = st.builds(
    MemoryModel,
    synchronous=st.booleans(),
    accumulate=st.integers(0, 3),
    correction_copies=st.integers(0, 2),
    optimizer_ratio=st.sampled_from([0.0, 0.25, 1.0, 2.0]),
    gradient_copies=st.integers(1, 2),
    recompute=st.booleans(),
    link_buffers=st.integers(0, 3),
    base_bytes=st.integers(0, 20),
)
links = st.builds(
    LinkSpec,
    forward_bytes_per_s=st.sampled_from([5.0, 20.0, inf]),
    backward_bytes_per_s=st.sampled_from([5.0, 20.0, inf]),
    latency_s=st.sampled_from([0.0, 0.5]),
    duplex=st.booleans(),
    uses_line=st.booleans(),
)
nodes = st.builds(
    Node,
    speed=st.sampled_from([0.5, 1.0, 3.0]),
    memory_bytes=st.sampled_from([inf, 900.0, 400.0, 150.0]),
    up_bytes_per_s=st.sampled_from([inf, 20.0, 5.0]),
    down_bytes_per_s=st.sampled_from([inf, 20.0, 5.0]),
)


@st.composite
def problems(draw: st.DrawFn, *, given_depths: bool = True) -> Problem:
    chain = draw(chains())
    num = min(draw(st.sampled_from([3, 2, 4, 1])), len(chain.cuts) + 1)
    return Problem(
        chain=chain,
        nodes=tuple(draw(st.lists(nodes, min_size=num, max_size=num))),
        links=tuple(draw(st.lists(links, min_size=num - 1, max_size=num - 1))),
        memory=draw(models),
        depths=tuple(draw(st.lists(st.integers(1, 4), min_size=num, max_size=num))) if given_depths else None,
        max_depth=None if given_depths else draw(st.sampled_from([None, 1, 2, 3])),
        slack=draw(st.integers(0, 1)),
        tolerance=0.0,
    )


def share(chain: Chain, start: int, stop: int) -> StageShare:
    """What a stage of ops `start` to `stop` consists of, the slow way."""

    def touched(storages: tuple[Storage, ...]) -> int:
        return sum(s.num_bytes for s in storages if any(start <= i < stop for i in s.ops))

    owned = sum(s.num_bytes for s in chain.weights if start <= min(s.ops) < stop)
    both_ends = [
        *chain.forward_bytes[start : stop + 1 : stop - start],
        *chain.backward_bytes[start : stop + 1 : stop - start],
    ]
    return StageShare(
        parameter_bytes=owned,
        borrowed_bytes=touched(chain.weights) - owned,
        fixed_bytes=touched(chain.fixed),
        saved_bytes=touched(chain.saved),
        work_bytes=max(chain.work_bytes[start:stop], default=0),
        input_bytes=chain.forward_bytes[start],
        link_bytes=sum(both_ends),
    )


def stretches(chain: Chain, cuts: tuple[int, ...]) -> list[Stretch]:
    bounds = (0, *cuts, chain.num_ops)
    return list(pairwise(bounds))


def stage_seconds(problem: Problem, cuts: tuple[int, ...]) -> list[float]:
    chain, forwards = problem.chain, 2 if problem.memory.recompute else 1
    return [
        (forwards * sum(chain.forward_s[a:b]) + sum(chain.backward_s[a:b])) / node.speed
        for (a, b), node in zip(stretches(chain, cuts), problem.nodes, strict=True)
    ]


def link_seconds(problem: Problem, cuts: tuple[int, ...]) -> list[float]:
    found = []
    for link, cut in zip(problem.all_links, cuts, strict=True):
        there = problem.chain.forward_bytes[cut] / link.forward_bytes_per_s
        back = problem.chain.backward_bytes[cut] / link.backward_bytes_per_s
        found.append(max(there, back) if link.duplex else there + back)
    return found


def line_seconds(problem: Problem, cuts: tuple[int, ...]) -> list[tuple[float, float]]:
    """Each node's upload and download."""
    chain, all_links, found = problem.chain, problem.all_links, []
    for j, node in enumerate(problem.nodes):
        up = down = 0
        if j > 0 and all_links[j - 1].uses_line:
            up += chain.backward_bytes[cuts[j - 1]]
            down += chain.forward_bytes[cuts[j - 1]]
        if j < len(cuts) and all_links[j].uses_line:
            up += chain.forward_bytes[cuts[j]]
            down += chain.backward_bytes[cuts[j]]
        found.append((up / node.up_bytes_per_s, down / node.down_bytes_per_s))
    return found


def want(problem: Problem, cuts: tuple[int, ...], depths: tuple[int, ...]) -> float:
    """By how much the worst stage is over its node's memory."""
    return max(
        stage_memory(share(problem.chain, a, b), depth, problem.memory).total - node.memory_bytes
        for (a, b), node, depth in zip(stretches(problem.chain, cuts), problem.nodes, depths, strict=True)
    )


def bottleneck_s(problem: Problem, cuts: tuple[int, ...]) -> float:
    lines = (seconds for both in line_seconds(problem, cuts) for seconds in both)
    return max(*stage_seconds(problem, cuts), *link_seconds(problem, cuts), *lines)


def all_cuts(problem: Problem) -> Iterator[tuple[int, ...]]:
    return combinations(problem.chain.cuts, len(problem.nodes) - 1)


def brute_force(problem: Problem, depths: tuple[int, ...]) -> tuple[float, int, float] | None:
    """The best bottleneck; of those whose slowest stage is within a tenth of the best: bytes over cuts, then squares.

    None if nothing fits.
    """
    fitting = [cuts for cuts in all_cuts(problem) if want(problem, cuts, depths) <= 0]
    if not fitting:
        return None
    best = min(bottleneck_s(problem, cuts) for cuts in fitting)
    good = [cuts for cuts in fitting if bottleneck_s(problem, cuts) <= best * (1 + 1e-9)]
    slowest = min(max(stage_seconds(problem, cuts)) for cuts in good)
    even = [cuts for cuts in good if max(stage_seconds(problem, cuts)) <= 1.1 * slowest * (1 + 1e-9)]
    bytes_, squares = min(
        (sum(map(problem.chain.cut_bytes, cuts)), sum(s * s for s in stage_seconds(problem, cuts))) for cuts in even
    )
    return best, bytes_, squares


def least_interval_s(problem: Problem) -> float:
    """The least interval of any cuts, each stage as deep as its memory and `max_depth` let it be; inf if none fits."""
    return min((_interval_s(problem, cuts) for cuts in all_cuts(problem)), default=inf)


def _interval_s(problem: Problem, cuts: tuple[int, ...]) -> float:
    chain, num = problem.chain, len(problem.nodes)
    seconds, slowest, trip = stage_seconds(problem, cuts), bottleneck_s(problem, cuts), 0.0
    if want(problem, cuts, (1,) * num) > 0:
        return inf
    for j in reversed(range(num)):
        if j < num - 1:
            link, cut = problem.all_links[j], cuts[j]
            trip += chain.forward_bytes[cut] / link.forward_bytes_per_s
            trip += chain.backward_bytes[cut] / link.backward_bytes_per_s + 2 * link.latency_s
        trip += seconds[j]
        start, stop = stretches(chain, cuts)[j]
        fitting = [
            depth
            for depth in range(1, (problem.max_depth or 60) + 1)
            if stage_memory(share(chain, start, stop), depth, problem.memory).total <= problem.nodes[j].memory_bytes
        ]
        slowest = max(slowest, trip / max(fitting))
    return slowest
