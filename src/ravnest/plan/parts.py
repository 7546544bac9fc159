"""A problem with numbers for every possible stage: seconds of compute, of the links and of each node's own line.

A node in the middle sends activations of the cut behind its stage and gradients of the cut before it over one line:

    up_j(i, k)   = (forward(k) + backward(i)) / upload of node j
    down_j(i, k) = (forward(i) + backward(k)) / download of node j

where only cuts whose links use the line count. The chain's bytes are those that travel: if messages are compressed,
whoever makes the chain has counted that.
"""

from __future__ import annotations

from itertools import pairwise

from .chain import Places
from .depth import LineSeconds, LinkSeconds
from .needs import needs_of
from .problem import Problem

__all__ = ["Parts"]


class Parts:
    """Stages are given by indices of places, `0 <= i < k <= places.end`; links and nodes by their number."""

    def __init__(self, problem: Problem, max_places: int | None = None) -> None:
        self.problem = problem
        self.places: Places = problem.chain.places(max_places or problem.num_places)
        self.upto_s = self.places.upto_s(recompute=problem.memory.recompute)
        self.needs = needs_of(self.places, problem.memory)
        num, bounds = len(problem.nodes), self.places.bounds
        self.links = [[self.link(j, b) for b in bounds] for j in range(num - 1)]
        self.link_s = [[link.interval_s for link in row] for row in self.links]
        self.link_s.append([0.0] * len(bounds))  # behind the leaf
        self.line_s = [self._line(j) for j in range(num)]

    def link(self, j: int, cut: int) -> LinkSeconds:
        chain = self.problem.chain
        return self.problem.wires[j].seconds(chain.forward_bytes[cut], chain.backward_bytes[cut])

    def _line(self, j: int) -> tuple[list[float], list[float], list[float], list[float]]:
        """Of node j: up by its start and by its end, down by its start and by its end, for each place."""
        chain, node, wires = self.problem.chain, self.problem.nodes[j], self.problem.wires
        forward = [chain.forward_bytes[b] for b in self.places.bounds]
        backward = [chain.backward_bytes[b] for b in self.places.bounds]
        before = float(j > 0 and wires[j - 1].uses_line)
        behind = float(j < len(wires) and wires[j].uses_line)

        def seconds(sizes: list[int], used: float, bytes_per_s: float) -> list[float]:
            return [size * used / bytes_per_s for size in sizes]

        return (
            seconds(backward, before, node.up_bytes_per_s), seconds(forward, behind, node.up_bytes_per_s),
            seconds(forward, before, node.down_bytes_per_s), seconds(backward, behind, node.down_bytes_per_s),
        )  # fmt: skip

    def stage_seconds(self, j: int, i: int, k: int) -> float:
        return (self.upto_s[k] - self.upto_s[i]) / self.problem.nodes[j].speed

    def line_seconds(self, j: int, i: int, k: int) -> LineSeconds:
        up_start, up_end, down_start, down_end = self.line_s[j]
        return LineSeconds(up_start[i] + up_end[k], down_start[i] + down_end[k])

    def starts(self, j: int, k: int) -> range:
        """Where stage j may start if it ends at k, nearest first: every stage before it has a place of its own."""
        return range(k - 1, j - 1, -1) if j else range(0, -1, -1)

    def ends(self, j: int) -> range:
        """Where stage j may end: a place at least for every other stage, and the last one at the end."""
        last = self.places.end - (len(self.problem.nodes) - 1 - j)
        return range(j + 1 if last < self.places.end else last, last + 1)

    def stretches(self, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
        """The stages between cuts, as pairs of places."""
        return list(pairwise(self.places.bounds.index(c) for c in (0, *cuts, self.places.bounds[-1])))
