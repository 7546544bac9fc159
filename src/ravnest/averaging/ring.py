"""Specification and schedule of one weighted ring all-reduce: no data, no clock, no I/O.

    result = sum over members i of  share[i] * vector[i],       share[i] = weight[i] / sum of all weights

All members have the same `RingSpec` but for `me`; the order of the members is the direction of the ring. The vector is
cut into one shard per member, shard c = elements [c N / C, (c + 1) N / C), and shards into chunks. Member p sends to
p + 1 and receives from p - 1:

    reduce, step k = 0 .. C - 2    sends shard p - k,      adds the arriving chunk to shard p - k - 1
    gather, step k = 0 .. C - 2    sends shard p + 1 - k,  copies the arriving one to shard p - k   (all modulo C)

After the reduce p has the whole sum of shard p + 1, and the gather distributes the sums. So each member sends
2 (C - 1) / C of the vector. A chunk is sent on as soon as it has arrived and been added: steps overlap, and only a
member's first shard can be sent before anything has arrived.

Links preserve order and every member sends in the order of its steps, so exactly one chunk can come next. Any other
(a repeated, early or out-of-range one, or one of another split) is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ravnest.averaging.codec import find_codec
from ravnest.core.config import config, require
from ravnest.errors import FrameError
from ravnest.protocol.averaging import Phase

__all__ = ["RingSpec", "RingSchedule", "SendChunk", "Slot"]


@config
class RingSpec:
    """One ring, as member `me` sees it. A chunk has `chunk_elements` float32, a megabyte by default."""

    id: int
    members: tuple[str, ...]
    me: str
    weights: tuple[float, ...]
    codec: str = "fp32"
    chunk_elements: int = 2**18

    def __post_init__(self) -> None:
        require(self.id >= 0, f"ring id must be >= 0, got {self.id}")
        require(len(set(self.members)) == len(self.members), f"members must be distinct, got {self.members}")
        require(self.me in self.members, f"{self.me} is not one of the members {self.members}")
        require(
            len(self.weights) == len(self.members),
            f"weights must have one number per member ({len(self.members)}), got {len(self.weights)}",
        )
        require(all(math.isfinite(w) and w >= 0 for w in self.weights), f"weights must be >= 0, got {self.weights}")
        total = sum(self.weights)
        require(math.isfinite(total) and total > 0, f"the sum of the weights must be finite and > 0, got {total}")
        require(self.chunk_elements > 0, f"chunk_elements must be > 0, got {self.chunk_elements}")
        find_codec(self.codec)

    @property
    def position(self) -> int:
        return self.members.index(self.me)

    @property
    def share(self) -> float:
        return self.weights[self.position] / math.fsum(self.weights)

    @property
    def share_before(self) -> float:
        """The share of the previous member."""
        return self.weights[self.position - 1] / math.fsum(self.weights)

    @property
    def before(self) -> str:
        """The previous member, which sends to this one."""
        return self.members[self.position - 1]

    @property
    def after(self) -> str:
        """The next member, to which this one sends."""
        return self.members[(self.position + 1) % len(self.members)]


class Slot(NamedTuple):
    """A chunk that is to arrive, for the elements `lo` up to `hi`."""

    phase: Phase
    step: int
    number: int
    lo: int
    hi: int


class SendChunk(NamedTuple):
    """Send elements `lo` up to `hi` to the next member."""

    phase: Phase
    step: int
    number: int
    lo: int
    hi: int


class RingSchedule:
    """The ring at `position`, as a state machine: driven by arrivals and sends, it returns the next chunks to send."""

    def __init__(self, position: int, num_members: int, num_elements: int, chunk_elements: int) -> None:
        require(0 <= position < num_members, f"position must be >= 0 and < {num_members}, got {position}")
        require(num_elements >= 0, f"num_elements must be >= 0, got {num_elements}")
        require(chunk_elements > 0, f"chunk_elements must be > 0, got {chunk_elements}")
        self._position, self._num_members = position, num_members
        self._num_elements, self._chunk_elements = num_elements, chunk_elements
        self._incoming = self._slots()
        self._expected = next(self._incoming, None)
        self._num_unsent = self._count_sends()

    @property
    def expected(self) -> Slot | None:
        """The only chunk that may arrive next; None when all have arrived."""
        return self._expected

    @property
    def num_unsent(self) -> int:
        """Chunks that this member has still to send, ready or not."""
        return self._num_unsent

    @property
    def is_done(self) -> bool:
        return self._expected is None and self._num_unsent == 0

    def begin(self) -> tuple[SendChunk, ...]:
        """The chunks that can be sent before anything has arrived: this member's own shard."""
        if self._num_members == 1:
            return ()
        chunks = enumerate(self._chunks(self._position))
        return tuple(SendChunk(Phase.REDUCE, 0, number, lo, hi) for number, (lo, hi) in chunks)

    def check(self, phase: Phase, step: int, number: int) -> Slot:
        """The slot of a chunk that is about to arrive. Raises `FrameError` if it is not the expected one."""
        slot = self._expected
        if slot is None:
            raise FrameError(f"{_name(phase, step, number)} arrived, but all chunks of the ring have arrived already")
        if (phase, step, number) != slot[:3]:
            raise FrameError(f"{_name(phase, step, number)} arrived, expected {_name(*slot[:3])}")
        return slot

    def arrived(self, phase: Phase, step: int, number: int) -> SendChunk | None:
        """Record an arrival; returns the chunk to send once this one is added (reduce) or copied (gather).

        A chunk goes round until every member has received it; the completed sum starts the gather.
        """
        slot = self.check(phase, step, number)
        self._expected = next(self._incoming, None)
        if step < self._num_members - 2:
            return SendChunk(phase, step + 1, number, slot.lo, slot.hi)
        return SendChunk(Phase.GATHER, 0, number, slot.lo, slot.hi) if phase is Phase.REDUCE else None

    def sent(self) -> None:
        """One more chunk has been sent."""
        assert self._num_unsent > 0, "more chunks were sent than there are"
        self._num_unsent -= 1

    def _slots(self) -> Iterator[Slot]:
        """All chunks that will arrive, in order."""
        for phase in Phase:
            for step in range(self._num_members - 1):
                shard = (self._position - step - (phase is Phase.REDUCE)) % self._num_members
                for number, (lo, hi) in enumerate(self._chunks(shard)):
                    yield Slot(phase, step, number, lo, hi)

    def _chunks(self, shard: int) -> Iterator[tuple[int, int]]:
        lo, hi = self._bounds(shard)
        for start in range(lo, hi, self._chunk_elements):
            yield start, min(start + self._chunk_elements, hi)

    def _bounds(self, shard: int) -> tuple[int, int]:
        size, members = self._num_elements, self._num_members
        return shard * size // members, (shard + 1) * size // members

    def _count_sends(self) -> int:
        """In the reduce every shard but the next member's p + 1, in the gather every shard but p + 2."""
        counts = []
        for shard in range(self._num_members):
            lo, hi = self._bounds(shard)
            counts.append(-((lo - hi) // self._chunk_elements))
        not_sent = counts[(self._position + 1) % self._num_members] + counts[(self._position + 2) % self._num_members]
        return 2 * sum(counts) - not_sent if self._num_members > 1 else 0


def _name(phase: Phase, step: int, number: int) -> str:
    return f"chunk {number} of {phase.name.lower()} step {step}"
