"""What can be done about one cluster that lost members, or whose members do not do what they did.

- cut it anew, over the same members in the same order;
- replace a member by an idle machine, where it was: with the same cuts only its own stage moves;
- split it again over those who are left.

Each is worth the samples it gives until the horizon; while parameters move to a cluster, it gives none:

    worth = samples/s * (horizon - seconds of moving)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ..core.config import format_bytes
from .fleet import ClusterPlan, Machine, Task
from .moves import Moves, moves
from .row import try_row

__all__ = ["Mend", "best_mend", "replacements", "worth"]

_TRIES = 4  # idle machines looked at for one place


@dataclass(frozen=True)
class Mend:
    """What a cluster becomes, and what was done, in words."""

    cluster: ClusterPlan
    what: str


def worth(cluster: ClusterPlan, moved: Moves, horizon_s: float) -> float:
    """Samples until the horizon."""
    return cluster.samples_per_s * max(0.0, horizon_s - moved.wait_s(cluster))


def best_mend(
    task: Task,
    running: Sequence[ClusterPlan],
    number: int,
    out: Collection[str],
    idle: Sequence[Machine],
    horizon_s: float,
) -> tuple[Mend, float] | None:
    """The most worthy thing to do about a running cluster without the members that are `out`, and its worth."""
    best: tuple[Mend, float] | None = None
    for mend in _mends(task, running[number], number, out, idle):
        moved = moves(task, running, [mend.cluster])
        value = worth(mend.cluster, moved, horizon_s)
        if best is None or value > best[1]:
            best = Mend(mend.cluster, f"{mend.what}, {_cost(moved)}"), value
    return best


def _mends(
    task: Task, cluster: ClusterPlan, number: int, out: Collection[str], idle: Sequence[Machine]
) -> Iterator[Mend]:
    left = [name for name in cluster.members if name not in out]
    if len(left) >= task.min_stages and (found := try_row(task, left)):
        what = f"split cluster {number} again over the {len(left)} left" if out else f"cut cluster {number} anew"
        yield Mend(found, f"{what}: {_rate(found)}")
    for names in replacements(task, cluster, out, idle):
        members = [names.get(name, name) for name in cluster.members]
        swaps = " and ".join(f"{old} by {new}" for old, new in names.items())
        for cuts in (cluster.partition.cuts, None):
            if found := try_row(task, members, cuts):
                yield Mend(found, f"replace {swaps}: cluster {number} does {_rate(found)}")


def replacements(
    task: Task, cluster: ClusterPlan, out: Collection[str], idle: Sequence[Machine]
) -> Iterator[dict[str, str]]:
    """Who might take whose place: of machines with the memory, those that would do the stage soonest."""
    stages = [stage for stage, name in enumerate(cluster.members) if name in out]
    ranked = {stage: sorted(idle, key=lambda m: _stage_s(task, cluster, stage, m)) for stage in stages}
    for first in range(min(_TRIES, len(idle))) if stages else ():
        names: dict[str, str] = {}
        for place, stage in enumerate(stages):
            free = (m.name for m in ranked[stage][0 if place else first :] if m.name not in names.values())
            if (name := next(free, None)) is None:
                break
            names[cluster.members[stage]] = name
        else:
            yield names


def _stage_s(task: Task, cluster: ClusterPlan, stage: int, machine: Machine) -> float:
    """Seconds per microbatch of a stage on another machine, by compute and line; never, if its memory is too small."""
    found, chain = cluster.partition, task.chain
    if found.memory[stage].total > machine.memory_bytes:
        return inf
    start, stop = list(pairwise((0, *found.cuts, chain.num_ops)))[stage]
    forwards = 2 if task.memory.recompute else 1
    work_s = forwards * sum(chain.forward_s[start:stop]) + sum(chain.backward_s[start:stop])
    forward = [chain.forward_bytes[cut] if 0 < cut < chain.num_ops else 0 for cut in (start, stop)]
    backward = [chain.backward_bytes[cut] if 0 < cut < chain.num_ops else 0 for cut in (start, stop)]
    return max(
        work_s / machine.speed,
        (forward[1] + backward[0]) / machine.up_bytes_per_s,
        (forward[0] + backward[1]) / machine.down_bytes_per_s,
    )


def _rate(cluster: ClusterPlan) -> str:
    return f"{cluster.samples_per_s:.3g} samples/s"


def _cost(moved: Moves) -> str:
    return f"{format_bytes(moved.num_bytes)} move in {moved.longest_s:.3g} s" if moved.num_bytes else "nothing moves"
