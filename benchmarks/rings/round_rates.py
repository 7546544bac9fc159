"""Computes samples per second during and between averaging rounds from a coordinator's journal.

Batches are settled one after the other in each cluster; an interval is the time from one to the next. A round is
compared with the intervals around it, from the end of the previous round to the start of the next, so that a longer
slowdown of the machine affects both. With r0 the samples/s of intervals that do not overlap the round, over all those
that do,

    samples/s while averaging = (their samples - r0 * their seconds outside of the round) / their seconds inside

A round starts with the snapshot and ends when the average has been applied; both are included.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from ravnest.coordinator.events import Event, LeaseSettled, RoundClosed, RoundCommitted, RoundStarted
from ravnest.coordinator.journal import Snapshot

__all__ = ["RoundRates", "rates_of_rounds", "read_events"]

WARM_UP_S = 4.0  # of training, which do not count
_HEAD = struct.Struct("!II")  # head of a record in the journal: its length and a checksum


@dataclass(frozen=True)
class RoundRates:
    """The seconds of a round, and the samples per second of all clusters around it and during it."""

    seconds: float
    between: float
    during: float


class _Span(NamedTuple):
    from_s: float
    to_s: float

    def overlap_s(self, other: _Span) -> float:
        return max(0.0, min(self.to_s, other.to_s) - max(self.from_s, other.from_s))


class _Batch(NamedTuple):
    at_s: float
    samples: int


def read_events(journal: Path) -> list[Event]:
    """All events of a journal that was closed properly."""
    data, start, events = journal.read_bytes(), 0, list[Event]()
    decoder = msgspec.msgpack.Decoder(Event | Snapshot)
    while start < len(data):
        length, _ = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        record = decoder.decode(data[start : start + length])
        start += length
        if not isinstance(record, Snapshot):
            events.append(record)
    return events


def rates_of_rounds(events: Sequence[Event], num_clusters: int) -> list[RoundRates]:
    """The rates of all rounds but those of the warm-up and the last one, during which nothing is trained."""
    settled, rounds = _settled(events), _rounds(events)
    if len(settled) != num_clusters:
        raise RuntimeError(f"expected {num_clusters} clusters that train, got {len(settled)}")
    begin_s = max(batches[0].at_s for batches in settled.values()) + WARM_UP_S
    bounds = [_Span(begin_s, begin_s), *(span for span in rounds if span.from_s > begin_s)]
    rates = [
        _rates(settled, span, _Span(before.to_s, after.from_s))
        for before, span, after in zip(bounds, bounds[1:], bounds[2:], strict=False)
    ]
    if not rates:
        raise RuntimeError("too few rounds to compare")
    return rates


def _settled(events: Sequence[Event]) -> dict[str, list[_Batch]]:
    """The settled batches of each cluster."""
    settled = defaultdict[str, list[_Batch]](list)
    for event in events:
        if isinstance(event, LeaseSettled):
            settled[event.cluster].append(_Batch(event.at_s, event.samples))
    return settled


def _rounds(events: Sequence[Event]) -> list[_Span]:
    rounds, opened_s, is_committed = list[_Span](), 0.0, False
    for event in events:
        match event:
            case RoundStarted(at_s=at_s, attempt=attempt):
                opened_s, is_committed = opened_s if attempt else at_s, False
            case RoundCommitted():
                is_committed = True
            case RoundClosed(at_s=at_s, reason=reason):
                if not is_committed:
                    raise RuntimeError(f"a round failed: {reason}")
                rounds.append(_Span(opened_s, at_s))
    return rounds


def _rates(settled: Mapping[str, Sequence[_Batch]], span: _Span, window: _Span) -> RoundRates:
    """The rates of one round, from batches settled within the window."""
    between = during = 0.0
    for batches in settled.values():
        within = [batch for batch in batches if window.from_s <= batch.at_s <= window.to_s]
        free, overlapping = _split(within, span)
        rate = sum(samples for samples, _, _ in free) / sum(seconds for _, seconds, _ in free)
        outside_s = sum(seconds - inside_s for _, seconds, inside_s in overlapping)
        between += rate
        samples = sum(samples for samples, _, _ in overlapping)
        during += (samples - rate * outside_s) / sum(inside_s for _, _, inside_s in overlapping)
    return RoundRates(span.to_s - span.from_s, between, during)


_Interval = tuple[int, float, float]  # samples, seconds, seconds within the round


def _split(batches: Sequence[_Batch], span: _Span) -> tuple[list[_Interval], list[_Interval]]:
    """Intervals that do not overlap the round, and those that do."""
    free, overlapping = list[_Interval](), list[_Interval]()
    for before, batch in pairwise(batches):
        inside_s = span.overlap_s(_Span(before.at_s, batch.at_s))
        (overlapping if inside_s else free).append((batch.samples, batch.at_s - before.at_s, inside_s))
    if not free or not overlapping:
        raise RuntimeError("a round has no batches during it or none around it: nothing to compare")
    return free, overlapping
