"""How many microbatches a stage has in flight: as few as leave no bubble.

A microbatch that stage j starts comes back to it, and leaves it, after the round trip through all later stages; one
more leaves in every interval of the slowest part. To fill the trip, and no more (each one only adds staleness):

    depth_j = ceil(trip_j / interval) + slack,   trip_j = seconds_j + there and back over link j + trip_{j+1}
    interval = max(all stages' seconds, all links' seconds)

With N equal stages and quick links that is N - j + 1 for j = 1..N. The leaf turns round at once: 1. `slack` covers
what times vary by; a stage that is not the leaf gets it. With fewer in flight, a microbatch is done only every
max(interval, trip_j / depth_j).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

from ..core.config import require

__all__ = ["LinkSeconds", "depths", "interval_s"]

_ROUNDING = 1e-9  # sums of floats: 3.0000000000000004 is 3


class LinkSeconds(NamedTuple):
    """One microbatch over a link: its way forward, its gradients' way back, and the latency of either."""

    forward_s: float
    backward_s: float
    latency_s: float = 0.0
    duplex: bool = True

    @property
    def interval_s(self) -> float:
        """How often a microbatch can pass."""
        return max(self.forward_s, self.backward_s) if self.duplex else self.forward_s + self.backward_s

    @property
    def round_trip_s(self) -> float:
        return self.forward_s + self.backward_s + 2 * self.latency_s


def depths(
    stage_seconds: Sequence[float], link_seconds: Sequence[LinkSeconds] = (), *, slack: int = 1
) -> tuple[int, ...]:
    """Microbatches in flight per stage, root first; without `link_seconds` links take no time."""
    require(slack >= 0, f"slack must be 0 or more, not {slack}")
    interval, trips = _interval_and_trips(stage_seconds, link_seconds)
    filled = [max(1, ceil(trip / interval - _ROUNDING)) if interval else 1 for trip in trips]
    return (*(depth + slack for depth in filled[:-1]), 1)


def interval_s(stage_seconds: Sequence[float], link_seconds: Sequence[LinkSeconds], in_flight: Sequence[int]) -> float:
    """Seconds from one microbatch to the next with so many in flight per stage."""
    interval, trips = _interval_and_trips(stage_seconds, link_seconds)
    filling = max(trip / depth for trip, depth in zip(trips, in_flight, strict=True))
    return filling if filling > interval * (1 + _ROUNDING) else interval


def _interval_and_trips(
    stage_seconds: Sequence[float], link_seconds: Sequence[LinkSeconds]
) -> tuple[float, list[float]]:
    """Seconds of the slowest part, and from each stage's forward to the end of its own backward."""
    require(len(stage_seconds) >= 1, "there is at least one stage")
    links = list(link_seconds) or [LinkSeconds(0.0, 0.0)] * (len(stage_seconds) - 1)
    require(len(links) == len(stage_seconds) - 1, f"{len(stage_seconds)} stages have {len(stage_seconds) - 1} links")
    interval = max(*stage_seconds, *(link.interval_s for link in links), 0.0)
    require(min(stage_seconds) >= 0 and interval < inf, "seconds must be finite and 0 or more")
    trips = [stage_seconds[-1]]
    for seconds, link in zip(reversed(stage_seconds[:-1]), reversed(links), strict=True):
        trips.append(trips[-1] + seconds + link.round_trip_s)
    return interval, trips[::-1]
