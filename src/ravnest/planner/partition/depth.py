"""Computes the depths of a pipeline: as few microbatches in flight per stage as leave no bubble.

A microbatch that stage j starts comes back to it, and leaves it, after the round trip through all later stages; one
more leaves in every interval of the bottleneck. To fill the trip, and no more (each one only adds staleness):

    depth_j = ceil(trip_j / interval) + slack,   trip_j = seconds_j + round trip over link j + trip_{j+1}
    interval = max(all stages' seconds, all links' seconds, all lines' seconds)

A line that a node shares between its neighbours carries several messages at once, so that each may take as long as the
line needs for all: forward over link j = max(its own seconds, up_j, down_{j+1}), and backward likewise. No message has
to wait that long, so the rate below counts its own seconds alone.

With N equal stages and fast links that is N - j + 1 for j = 1..N. The last stage turns round at once: 1. `slack`
covers variations of all times; only the last stage has none. With fewer in flight (`max_depth`, or too little memory),
a microbatch is done only every max(interval, trip_j / depth_j).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple

from ravnest.core.config import require

__all__ = ["LineSeconds", "LinkSeconds", "bottleneck_s", "depths", "interval_s", "needed_depth"]

_ROUNDING = 1e-9  # sums of floats: 3.0000000000000004 is 3


class LinkSeconds(NamedTuple):
    """One microbatch over a link: its activations forward, its gradients backward, and the latency of either."""

    forward_s: float
    backward_s: float
    latency_s: float = 0.0
    duplex: bool = True

    @property
    def interval_s(self) -> float:
        """Least time from one microbatch to the next."""
        return max(self.forward_s, self.backward_s) if self.duplex else self.forward_s + self.backward_s

    @property
    def round_trip_s(self) -> float:
        return self.forward_s + self.backward_s + 2 * self.latency_s


class LineSeconds(NamedTuple):
    """One microbatch over a node's line: all that the node sends, and all that it receives."""

    up_s: float = 0.0
    down_s: float = 0.0

    @property
    def interval_s(self) -> float:
        """Least time from one microbatch to the next."""
        return max(self.up_s, self.down_s)


def depths(
    stage_seconds: Sequence[float],
    link_seconds: Sequence[LinkSeconds] = (),
    line_seconds: Sequence[LineSeconds] = (),
    *,
    slack: int = 1,
    max_depth: int | None = None,
) -> tuple[int, ...]:
    """Microbatches in flight per stage, first stage first; links and lines that are not given take no time."""
    require(slack >= 0, f"slack must be >= 0, got {slack}")
    require(max_depth is None or max_depth >= 1, f"max_depth must be >= 1, got {max_depth}")
    interval, trips = _interval_and_trips(stage_seconds, link_seconds, line_seconds, is_shared=True)
    most = inf if max_depth is None else max_depth
    filled = [needed_depth(trip, interval) for trip in trips]
    return (*(int(min(depth + slack, most)) for depth in filled[:-1]), 1)


def needed_depth(trip_s: float, every_s: float) -> int:
    """Microbatches in flight that fill a trip, if one is done every `every_s`."""
    return max(1, ceil(trip_s / every_s - _ROUNDING)) if every_s else 1


def interval_s(
    stage_seconds: Sequence[float],
    link_seconds: Sequence[LinkSeconds],
    in_flight: Sequence[int],
    line_seconds: Sequence[LineSeconds] = (),
) -> float:
    """Seconds from one microbatch to the next with `in_flight` per stage."""
    interval, trips = _interval_and_trips(stage_seconds, link_seconds, line_seconds)
    filling = max(trip / depth for trip, depth in zip(trips, in_flight, strict=True))
    return filling if filling > interval * (1 + _ROUNDING) else interval


def bottleneck_s(
    stage_seconds: Sequence[float], link_seconds: Sequence[LinkSeconds], line_seconds: Sequence[LineSeconds]
) -> float:
    """Seconds of the slowest stage, link or line."""
    return max(
        0.0, *stage_seconds, *(link.interval_s for link in link_seconds), *(line.interval_s for line in line_seconds)
    )


def _interval_and_trips(
    stage_seconds: Sequence[float],
    link_seconds: Sequence[LinkSeconds],
    line_seconds: Sequence[LineSeconds],
    *,
    is_shared: bool = False,
) -> tuple[float, list[float]]:
    """Seconds of the bottleneck, and from each stage's forward to the end of its own backward.

    `is_shared`: each message shares its lines with all others that use them.
    """
    num = len(stage_seconds)
    require(num >= 1, "stage_seconds must not be empty")
    links = list(link_seconds) or [LinkSeconds(0.0, 0.0)] * (num - 1)
    require(len(links) == num - 1, f"{num} stages need {num - 1} links or none, got {len(links)}")
    require(len(line_seconds) in (0, num), f"{num} stages need {num} lines or none, got {len(line_seconds)}")
    interval = bottleneck_s(stage_seconds, links, line_seconds)
    require(min(stage_seconds) >= 0 and interval < inf, "seconds must be finite and >= 0")
    if is_shared and line_seconds:
        links = [_on_shared_lines(link, *ends) for link, ends in zip(links, pairwise(line_seconds), strict=True)]
    trips = [stage_seconds[-1]]
    for seconds, link in zip(reversed(stage_seconds[:-1]), reversed(links), strict=True):
        trips.append(trips[-1] + seconds + link.round_trip_s)
    return interval, trips[::-1]


def _on_shared_lines(link: LinkSeconds, near: LineSeconds, far: LineSeconds) -> LinkSeconds:
    return link._replace(
        forward_s=max(link.forward_s, near.up_s, far.down_s), backward_s=max(link.backward_s, far.up_s, near.down_s)
    )
