"""How fast a run on this machine will go, before it is run: from seconds per microbatch to samples per second.

A node that is alone on its core passes a microbatch in its own seconds. Processes of one machine also share its cores:

    interval = max(the pipe's interval, for each core: the seconds of all nodes on it)       nodes pinned to cores
    interval = max(the pipe's interval, seconds of all nodes * threads / cores)              else
    window   = A * interval                                 or, flushed: first trip + (A - 1) * interval
    rate     = samples of a window / window
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ravnest.core.config import config, require
from ravnest.core.schedule import StageSchedule
from ravnest.planner import interval_s

__all__ = ["Cores", "expected_rate"]


@config
class Cores:
    """Where nodes compute: on a core of their own or one that they share (`pinned`), else on any of `count`."""

    count: float
    threads: int = 1
    pinned: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require(self.count > 0, f"count must be > 0, got {self.count}")
        require(self.threads >= 1, f"a node has at least one thread, not {self.threads}")

    def of(self, group: Sequence[int], num_clusters: int) -> Cores:
        """Return the cores as the nodes of one of several clusters have them."""
        if self.pinned is not None:
            return replace(self, pinned=tuple(self.pinned[i] for i in group))
        return replace(self, count=self.count / num_clusters)

    def interval_s(self, work_s: Sequence[float]) -> float:
        """How often all nodes' work can be done, if each needs so many seconds of a whole core."""
        if self.pinned is None:
            return sum(work_s) * self.threads / self.count
        load = dict.fromkeys(self.pinned, 0.0)
        for core, seconds in zip(self.pinned, work_s, strict=True):
            load[core] += seconds
        return max(load.values())


def expected_rate(
    work_s: Sequence[float], speeds: Sequence[float], rules: Sequence[StageSchedule], cores: Cores, batch_size: int
) -> float:
    """Samples per second: `work_s` is what a microbatch takes each node at full speed, `speeds` what it has of that."""
    own_s = [seconds / speed for seconds, speed in zip(work_s, speeds, strict=True)]
    accumulate = rules[0].accumulate
    every_s = max(interval_s(own_s, (), _in_flight(rules)), cores.interval_s(work_s))
    window_s = accumulate * every_s
    if all(rule.delay == 0 for rule in rules):
        window_s = max(sum(own_s) + (accumulate - 1) * every_s, window_s)
    return batch_size / max(window_s, 1e-9)


def _in_flight(rules: Sequence[StageSchedule]) -> list[int]:
    """What the depth allows, and the delay: no more than its windows hold."""
    return [min(rule.depth, rule.accumulate * max(rule.delay, 1)) for rule in rules]
