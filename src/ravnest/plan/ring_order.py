"""In which order machines form a ring: the best slowest link, then the least latency, for rings of any length.

In a ring everybody sends to the next and receives from the one before. Over lines alone that is everybody's upload and
everybody's download, in any order: only neighbours of one site, who use its network, spare their lines. So the best
order keeps a site together, and of its lines uses one to come in and one to go out:

    slowest = min(site networks in use, over sites of  max over entry != exit of  min(down(entry), up(exit)))

Any other order uses more lines than these, so it is exact if a site's network is no slower than the slowest line.
Regions are kept together too, since every step into another one costs the way there; the latency of a line counts the
same wherever it stands. So latency is the least too, if a site lies in one region and its network has the lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import inf

from .fleet import Machine

__all__ = ["order_ring"]

Cost = Callable[[Machine], float]
Group = Sequence[Machine]


def order_ring(machines: Sequence[Machine]) -> tuple[Machine, ...]:
    """The machines in the order in which each sends to the next, and the last to the first."""
    home = {m.site: m.region for m in machines if m.site}
    placed = sorted(machines, key=lambda m: (home.get(m.site, m.region), m.site, m.name))
    if len(home) == sum(m.site != "" for m in machines):
        return tuple(placed)  # nobody shares a site
    groups = [group for site, members in groupby(placed, lambda m: m.site) for group in _groups(site, members)]
    if len(groups) == 1:
        return tuple(placed)
    least = min(map(_best_bytes_per_s, groups))
    return tuple(machine for group in groups for machine in _path(group, least))


def _groups(site: str, members: Iterable[Machine]) -> list[Group]:
    """Those who reach each other without their lines: everybody is alone who has no site."""
    return [tuple(members)] if site else [(machine,) for machine in members]


def _best_bytes_per_s(group: Group) -> float:
    """Of the worse of the two lines in use."""
    if len(group) == 1:
        return min(group[0].down_bytes_per_s, group[0].up_bytes_per_s)
    entry, leave = _ends(group, lambda m: -m.down_bytes_per_s, lambda m: -m.up_bytes_per_s, max)
    return min(entry.down_bytes_per_s, leave.up_bytes_per_s)


def _path(group: Group, least_bytes_per_s: float) -> Group:
    """From entry to exit: of the lines that are quick enough, those of least latency."""
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
