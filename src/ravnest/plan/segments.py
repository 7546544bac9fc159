"""What clusters that cut the model differently have in common: the stretches between all of their cuts.

    bounds = 0, the union of all clusters' cuts, the end          segment s = ops [bounds[s], bounds[s + 1])

No cluster cuts inside a segment, so it has exactly one owner in each: the stage it lies in. A parameter belongs to the
segment of its first op, as it belongs to the stage of its first op; who borrows a tied parameter has no part in it. So
segments share out the parameters, and the owners of a segment hold the same ones.

A segment without parameters is kept, so that segments cover the program, but there is nothing to average in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..core.config import require
from .chain import Chain

__all__ = ["Segment", "find_segments"]


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
    require(len(cuts) >= 1, "there is at least one cluster")
    legal = set(chain.cuts)
    for number, own in enumerate(cuts):
        require(all(a < b for a, b in pairwise(own)), f"cuts must rise: cluster {number} has {tuple(own)}")
        require(legal.issuperset(own), f"cluster {number} is cut at {tuple(own)}, where the chain cannot all be cut")
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
    """Along the chain a cluster goes on to its next stage at each of its cuts."""
    moving_on: dict[int, list[int]] = {bound: [] for bound in bounds}
    for cluster, own in enumerate(cuts):
        for cut in own:
            moving_on[cut].append(cluster)
    stages, owners = [0] * len(cuts), []
    for bound in bounds[:-1]:
        for cluster in moving_on[bound]:
            stages[cluster] += 1
        owners.append(tuple(stages))
    return owners
