"""Samples per second while clusters average and between their rounds, from a coordinator's journal.

Batches are settled one after the other in each cluster; a stretch is the time from one to the next. A round is compared
with the stretches beside it, back to the end of the round before and on to the beginning of the next, so that whatever
slows the machine for longer slows both. With r0 the samples/s of stretches that the round does not touch, over all
those that it does,

    samples/s while averaging = (their samples - r0 * their seconds outside of the round) / their seconds inside

A round begins with a snapshot and ends when the average has been taken over: both count.
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

from ravnest.coordinator.events import Event, LeaseSettled, RoundClosed, RoundCommitted, RoundOpened
from ravnest.coordinator.journalfile import Snapshot

__all__ = ["RoundRates", "account", "read"]

WARM_UP_S = 4.0  # of training that does not count
_HEAD = struct.Struct("!II")  # of a record in the journal: its length, and a checksum


@dataclass(frozen=True)
class RoundRates:
    """A round: its seconds, and samples per second of all clusters beside it and in it."""

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


def read(journal: Path) -> list[Event]:
    """All events of a journal that was closed well."""
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


def account(events: Sequence[Event], num_clusters: int) -> list[RoundRates]:
    """Every round but those of the warm-up and the last one, during which nothing is trained any more."""
    settled, rounds = _settled(events), _rounds(events)
    if len(settled) != num_clusters:
        raise RuntimeError(f"{len(settled)} clusters trained, not {num_clusters}")
    begin_s = max(batches[0].at_s for batches in settled.values()) + WARM_UP_S
    bounds = [_Span(begin_s, begin_s), *(span for span in rounds if span.from_s > begin_s)]
    found = [
        _rates(settled, span, _Span(before.to_s, after.from_s))
        for before, span, after in zip(bounds, bounds[1:], bounds[2:], strict=False)
    ]
    if not found:
        raise RuntimeError("there were too few rounds to compare anything")
    return found


def _settled(events: Sequence[Event]) -> dict[str, list[_Batch]]:
    """The batches of each cluster."""
    settled = defaultdict[str, list[_Batch]](list)
    for event in events:
        if isinstance(event, LeaseSettled):
            settled[event.cluster].append(_Batch(event.at_s, event.samples))
    return settled


def _rounds(events: Sequence[Event]) -> list[_Span]:
    rounds, opened_s, is_committed = list[_Span](), 0.0, False
    for event in events:
        match event:
            case RoundOpened(at_s=at_s, attempt=attempt):
                opened_s, is_committed = opened_s if attempt else at_s, False
            case RoundCommitted():
                is_committed = True
            case RoundClosed(at_s=at_s, reason=reason):
                if not is_committed:
                    raise RuntimeError(f"a round failed: {reason}")
                rounds.append(_Span(opened_s, at_s))
    return rounds


def _rates(settled: Mapping[str, Sequence[_Batch]], span: _Span, window: _Span) -> RoundRates:
    """Of one round, from what was settled within the window."""
    between = during = 0.0
    for batches in settled.values():
        within = [batch for batch in batches if window.from_s <= batch.at_s <= window.to_s]
        free, touched = _split(within, span)
        rate = sum(samples for samples, _, _ in free) / sum(seconds for _, seconds, _ in free)
        outside_s = sum(seconds - inside_s for _, seconds, inside_s in touched)
        between += rate
        samples = sum(samples for samples, _, _ in touched)
        during += (samples - rate * outside_s) / sum(inside_s for _, _, inside_s in touched)
    return RoundRates(span.to_s - span.from_s, between, during)


_Stretch = tuple[int, float, float]  # samples, seconds, seconds within the round


def _split(batches: Sequence[_Batch], span: _Span) -> tuple[list[_Stretch], list[_Stretch]]:
    """Stretches that the round does not touch, and those that it does."""
    free, touched = list[_Stretch](), list[_Stretch]()
    for before, batch in pairwise(batches):
        inside_s = span.overlap_s(_Span(before.at_s, batch.at_s))
        (touched if inside_s else free).append((batch.samples, batch.at_s - before.at_s, inside_s))
    if not free or not touched:
        raise RuntimeError("rounds leave no time between them, or take none: nothing can be compared")
    return free, touched
