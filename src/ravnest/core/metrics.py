"""Metrics of a stage: cumulative counters, so that the difference of any two reports gives the rate between them."""

from __future__ import annotations

import msgspec

__all__ = ["StageMetrics", "bubble"]


class StageMetrics(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A stage's counters at one time. `idle_s` starts after the first update: filling the pipeline is not a bubble."""

    stage: int = 0
    updates: int = 0
    microbatches: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    step_s: float = 0.0
    steady_busy_s: float = 0.0  # the part of busy_s after the first update
    in_flight: int = 0
    queued: int = 0
    sending: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    versions: int = 0
    staleness: dict[int, int] = {}


def bubble(before: StageMetrics, after: StageMetrics) -> float:
    """The fraction of the time between two reports in which the stage was idle."""
    busy, idle = after.steady_busy_s - before.steady_busy_s, after.idle_s - before.idle_s
    return idle / (busy + idle) if busy + idle > 0 else 0.0
