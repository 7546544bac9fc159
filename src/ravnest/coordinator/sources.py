"""What a new cluster begins from: for every stretch of the model the newest copy that somebody has. Pure.

A copy is of a stage, which is a stretch of the chain between two cuts of its cluster; stages of the new cluster may be
cut elsewhere, so one may need several copies. A stage that trains now is a copy that is new at any moment. A node's own
copy, which need not move, is preferred to one that is not much newer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ..core.control import Copy
from .records import State

__all__ = ["Beginning", "Found", "find_beginning"]

_OWN_S = 15.0  # by which a copy elsewhere must be newer than one's own to be worth moving
_ALIKE_S = 2.0  # copies that differ by less are as good as each other: the better line decides


@dataclass(frozen=True)
class Found:
    """A copy, who has it, as of when, and which ops it is of."""

    copy: Copy
    holder: str
    at_s: float
    first: int
    end: float
    up_bytes_per_s: float


@dataclass(frozen=True)
class Beginning:
    """Copies for each stage, root first; which stages have a stretch that nobody has a copy of; all in words."""

    stages: tuple[tuple[Found, ...], ...]
    lacking: tuple[int, ...]
    updates: int
    words: str


def find_beginning(
    state: State, members: Sequence[str], cuts: Sequence[int], now_s: float, updates: Mapping[tuple[str, int], int]
) -> Beginning:
    """`updates` are those of stages that train now, by cluster and stage."""
    there = list(_all(state, now_s, updates))
    stages: list[tuple[Found, ...]] = []
    lacking: list[int] = []
    for stage, (name, (first, end)) in enumerate(zip(members, pairwise((0, *cuts, inf)), strict=True)):
        found, is_whole = _cover(there, name, int(first), end)
        stages.append(found)
        if not is_whole:
            lacking.append(stage)
    newest = max((found.copy.updates for stage in stages for found in stage), default=0)
    return Beginning(tuple(stages), tuple(lacking), newest, _words(members, stages, lacking, now_s))


def _all(state: State, now_s: float, updates: Mapping[tuple[str, int], int]) -> Iterator[Found]:
    """Whatever somebody has who is there."""
    for cluster in state.training_clusters():
        for stage, name in enumerate(cluster.plan.members):
            made = updates.get((cluster.plan.id, stage), 0)
            if made and _is_there(state, name):
                yield _found(state, Copy(cluster.plan.id, stage, made), name, now_s)
    for name, node in state.nodes.items():
        for kept in node.copies:
            if kept.copy.cluster in state.cuts and kept.copy.updates and _is_there(state, name):
                yield _found(state, kept.copy, name, kept.at_s)


def _is_there(state: State, name: str) -> bool:
    return state.nodes[name].is_present and not state.last_heard(name).is_away


def _found(state: State, copy: Copy, holder: str, at_s: float) -> Found:
    bounds = (0, *state.cuts[copy.cluster], inf)
    first, end = bounds[copy.stage], bounds[copy.stage + 1]
    return Found(copy, holder, at_s, int(first), end, state.nodes[holder].profile.up_bytes_per_s)


def _cover(there: Sequence[Found], name: str, first: int, end: float) -> tuple[tuple[Found, ...], bool]:
    """Copies that together have all ops from `first` to `end`, and whether they do."""
    bounds = sorted({first, end, *(b for f in there for b in (f.first, f.end) if first < b < end)})
    chosen: list[Found] = []
    is_whole = True
    for low, high in pairwise(bounds):
        best = max(
            (f for f in there if f.first <= low and high <= f.end), key=lambda f: _worth(f, name, chosen), default=None
        )
        if best is None:
            is_whole = False
        elif best not in chosen:
            chosen.append(best)
    return tuple(chosen), is_whole


def _worth(found: Found, name: str, chosen: Sequence[Found]) -> tuple[float, bool, bool, float, str]:
    is_own = found.holder == name
    at_s = found.at_s + (_OWN_S if is_own else 0.0)
    return at_s // _ALIKE_S, is_own, found in chosen, found.up_bytes_per_s, found.holder


def _words(members: Sequence[str], stages: Sequence[tuple[Found, ...]], lacking: Sequence[int], now_s: float) -> str:
    """Only of what is not simply kept."""
    told: list[str] = []
    for stage, (name, found) in enumerate(zip(members, stages, strict=True)):
        for one in found:
            age_s = max(now_s - one.at_s, 0.0)
            if one.holder != name:
                told.append(f"{name} gets what {one.holder} had learnt {age_s:.0f} s ago" if age_s > 1
                            else f"{name} gets what {one.holder} has learnt")  # fmt: skip
        if stage in lacking:
            told.append(f"nobody has a copy of all of stage {stage}")
    return "; ".join(told)
