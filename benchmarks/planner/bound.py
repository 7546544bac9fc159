"""Computes an upper bound of the samples per second of a fleet: proven, but not tight in every case.

A cluster that does R microbatches per second gives each member a range of ops with work w, where

    w / speed <= 1 / R,   its line's seconds <= 1 / R,   its memory with one in flight <= memory

so machine j does at most w_j(R) of the chain's W seconds there, and as the ranges of a cluster add up to W, at most

    n(R) = floor(min(sum over j of w_j(R) / W,  machines with w_j(R) > 0 / least members))

clusters do R or more. All clusters together do the integral of n over R. That is loose for high R, where a machine
counts several times. But the part of a cluster's rate above some R0 is also the sum of its members' shares of it, and a
member's share of rate R is at most R * w_j(R) / W. So for every R0

    total <= integral of n from 0 to R0  +  sum over j of the most, over R > R0, of  R * w_j(R) / W * (1 - R0 / R)

and the least over all R0 is the bound. n and w_j only fall with R, so the values at the lower end of each small step
of R, times its upper end, are never too small.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ravnest.planner import Machine, Task, stage_memory

__all__ = ["most_samples_per_s"]

_STEP = 1.02  # from one R to the next
_STEPS = 600
Numbers = NDArray[np.float64]


def most_samples_per_s(task: Task) -> float:
    """An upper bound for clusters of at least `min_stages` machines of this fleet."""
    candidates = _StageCandidates(task)
    sites = Counter(machine.site for machine in task.fleet.machines if machine.site)
    speeds = np.array([machine.speed for machine in task.fleet.machines])
    highest = float(speeds.sum()) / candidates.whole_s
    rates = highest * _STEP ** np.arange(-_STEPS, 1, dtype=np.float64)
    work = np.array([candidates.most_work(m, rates, alone=sites[m.site] < 2) for m in task.fleet.machines])
    work_rates = np.minimum(work * rates * _STEP, speeds[:, None])  # at the upper end of each step
    members = min(task.min_stages, len(speeds))
    counts = np.floor(np.minimum(work.sum(0) / candidates.whole_s * (1 + 1e-9), (work > 0).sum(0) / members))
    widths = np.concatenate([[rates[0]], np.diff(rates)])
    below = np.concatenate([[0.0], np.cumsum(np.concatenate([[len(speeds) / members], counts[:-1]]) * widths)])
    floors = np.concatenate([[0.0], rates])
    bounds = [
        low + _above(work_rates, rates, floor) / candidates.whole_s for low, floor in zip(below, floors, strict=True)
    ]
    return float(min(bounds)) * task.microbatch


def _above(work_rates: Numbers, rates: Numbers, floor: float) -> float:
    """The sum over all machines of what rates above `floor` can add."""
    uppers = rates * _STEP
    shares = work_rates * np.clip(1 - floor / uppers, 0.0, None)
    return float(shares.max(1).sum())


class _StageCandidates:
    """All possible stages of a chain, without the whole chain if clusters have two members or more."""

    def __init__(self, task: Task) -> None:
        chain = task.chain
        cut_points = chain.cut_points(len(chain.cuts) + 1)
        upto_s, end = cut_points.upto_s(recompute=task.memory.recompute), cut_points.end
        whole = task.min_stages == 1 or len(task.fleet.machines) == 1 or end == 1
        pairs = [(i, k) for k in range(1, end + 1) for i in range(k) if whole or (i, k) != (0, end)]
        cuts = [(cut_points.bounds[i], cut_points.bounds[k], i > 0, k < end) for i, k in pairs]
        forward, backward = chain.forward_bytes, chain.backward_bytes
        self.whole_s = upto_s[-1]
        self.work_s = np.array([upto_s[k] - upto_s[i] for i, k in pairs])
        self.up_bytes = np.array([backward[a] * before + forward[b] * behind for a, b, before, behind in cuts], float)
        self.down_bytes = np.array([forward[a] * before + backward[b] * behind for a, b, before, behind in cuts], float)
        self.memory = np.array([stage_memory(cut_points.share(i, k), 1, task.memory).total for i, k in pairs], float)

    def most_work(self, machine: Machine, rates: Numbers, *, alone: bool) -> Numbers:
        """w_j(R) for each rate."""
        line_s = np.maximum(self.up_bytes / machine.up_bytes_per_s, self.down_bytes / machine.down_bytes_per_s)
        least_s = np.maximum(self.work_s / machine.speed, line_s if alone else 0.0)
        fits = self.memory <= machine.memory_bytes
        order = np.argsort(least_s[fits], kind="stable")
        best = np.concatenate([[0.0], np.maximum.accumulate(self.work_s[fits][order])])
        return best[np.searchsorted(least_s[fits][order], (1 + 1e-9) / rates, side="right")]
