"""The data of one member in one ring: adds, copies, encodes and decodes chunks as `RingSchedule` decides.

No threads, no clock, no I/O. `vector` is the member's contribution and is only read; the average grows in `result`,
chunk by chunk. (They may be the same memory if there will be no second attempt.) Copies are avoided: fp32 chunks are
sent from `result`, and gathered chunks of any codec are received into `result` itself. A gathered chunk that must be
sent on stays there encoded until it is sent, and is then decoded in place: every member decodes the same bytes,
including the one that encoded them.

Between members of one host fp32 chunks are not sent at all. If `vector` and `result` are in a `SharedBuffer`, chunks
are *published*: the next member reads them in place. A member's own first shard is then read unscaled from `vector`.

One thread receives (`receive_buffer`, then `take`), one sends (`load`, then `sent`); each has its own `ScratchBuffers`.

`digest` summarizes a result, so that members can check that they have the same bits before they use them:

    column[j] = sum over rows i of word[512 i + j]  (modulo 2**64)        digest = hash(length, columns)

The sum runs at memory speed (a cryptographic hash of all bytes takes ten times as long) and any accidental difference
changes it. It does not protect against a malicious member, which can send the right digest of wrong bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ravnest.averaging.codec import Bytes, Floats, ScratchBuffers, find_codec, is_finite
from ravnest.averaging.ring import RingSchedule, RingSpec, SendChunk, Slot
from ravnest.averaging.shared_memory import SharedBuffer
from ravnest.core.config import require
from ravnest.errors import BadContribution, FrameError
from ravnest.protocol.averaging import Chunk, Phase

__all__ = ["digest", "Contribution", "codec_error", "new_residual"]

_COLUMNS = 512
_DIGEST_WORDS = _COLUMNS * 256  # a megabyte: small enough for the cache
_BLOCK_ELEMENTS = 2**17  # processed together, so that the finite check reads from the cache


def digest(vector: Floats) -> str:
    """A digest of 32 hexadecimal digits."""
    whole = vector.size // (2 * _COLUMNS) * (2 * _COLUMNS)
    words = vector[:whole].view(np.uint64)
    hasher = hashlib.blake2b(vector.size.to_bytes(8, "little"), digest_size=16)
    for start in range(0, words.size, _DIGEST_WORDS):
        rows = words[start : start + _DIGEST_WORDS].reshape(-1, _COLUMNS)
        hasher.update(np.add.reduce(rows, axis=0).data)
    hasher.update(vector[whole:].view(np.uint8).data)
    return hasher.hexdigest()


def new_residual(spec: RingSpec, num_elements: int) -> Floats:
    """The initial residual of error feedback: zeros, or empty for a lossless codec."""
    return np.zeros(0 if find_codec(spec.codec).is_lossless else num_elements, np.float32)


def codec_error(contributions: Sequence[Contribution]) -> float:
    """The root mean square of the residuals over that of the averages: this member's codec error in a round."""
    lossy = [contribution for contribution in contributions if not contribution.codec.is_lossless]
    lost = sum(_sum_of_squares(contribution.residual) for contribution in lossy)
    total = sum(_sum_of_squares(contribution.result) for contribution in lossy)
    return math.sqrt(lost / total) if total > 0 else 0.0


class Contribution:
    """One member's vector, result and residual in one ring.

    `residual` is this member's error feedback: it is changed, and carries over to the next round. A failed attempt
    leaves its own errors in place of those it had used up. That is wrong once, by no more than the codec's error, and
    saves a second copy.
    """

    def __init__(self, spec: RingSpec, vector: Floats, result: Floats, residual: Floats | None = None) -> None:
        for what, array in (("vector", vector), ("result", result)):
            is_flat = array.dtype == np.float32 and array.ndim == 1 and array.flags.c_contiguous
            require(is_flat, f"the {what} of ring {spec.id} must be contiguous float32 with one dimension")
        require(
            vector.size == result.size,
            f"vector and result of ring {spec.id} must have one size, got {vector.size} and {result.size}",
        )
        self.spec, self.codec = spec, find_codec(spec.codec)
        self._vector, self._result = vector, result
        self._share, self._share_before = np.float32(spec.share), np.float32(spec.share_before)
        self._residual = new_residual(spec, vector.size) if residual is None else residual
        expected = 0 if self.codec.is_lossless else vector.size
        require(
            self._residual.size in (expected, vector.size),
            f"the residual of ring {spec.id} must have {expected} elements, got {self._residual.size}",
        )
        self.ring = RingSchedule(spec.position, len(spec.members), vector.size, spec.chunk_elements)
        self.sent_bytes = 0

    @property
    def result(self) -> Floats:
        return self._result

    @property
    def residual(self) -> Floats:
        return self._residual

    def begin(self) -> tuple[SendChunk, ...]:
        """The chunks that can be sent immediately. In a ring of one member, computes the result."""
        if len(self.spec.members) == 1:
            self._contribute(0, self._vector.size)
        return self.ring.begin()

    def check(self, chunk: Chunk, lengths: tuple[int, ...]) -> Slot:
        """The slot of a chunk that is about to arrive. Raises `FrameError` unless it is the next, of the right size."""
        slot = self.ring.check(chunk.phase, chunk.step, chunk.index)
        if chunk.offset is not None and not self.codec.is_lossless:
            raise FrameError(f"a chunk of ring {self.spec.id} is in shared memory, but {self.codec.name} is encoded")
        expected = (self.codec.wire_bytes(slot.hi - slot.lo),) if chunk.offset is None else ()
        if lengths != expected:
            raise FrameError(f"a chunk of ring {self.spec.id} must have {expected} bytes, got {lengths}")
        return slot

    def receive_buffer(self, slot: Slot, scratch: ScratchBuffers) -> memoryview:
        """The memory to receive the chunk's bytes into."""
        return (self._scratch_wire(slot, scratch) if slot.phase is Phase.REDUCE else self._in_result(slot)).data

    def take(self, slot: Slot, scratch: ScratchBuffers, published: Floats | None = None) -> SendChunk | None:
        """Add or copy a chunk, received or published by the previous member; returns the next chunk to send.

        Raises `BadContribution` if a number is not finite.
        """
        if slot.phase is Phase.REDUCE and published is not None:
            self._add(slot, published, scratch if slot.step == 0 else None)
        elif slot.phase is Phase.REDUCE:
            self._add(slot, self._received(slot, scratch))
        elif published is not None:
            self._copy(slot, published)
        elif not self.codec.is_finite(self._in_result(slot), slot.hi - slot.lo):
            raise self._bad(self.spec.before, f"the average from {self.spec.before}")
        send = self.ring.arrived(slot.phase, slot.step, slot.number)
        if send is None:
            self._decode_in_place(slot, scratch)
        return send

    def published_offset(self, send: SendChunk, buffer: SharedBuffer | None) -> int | None:
        """The byte offset in `buffer` at which the next member reads the chunk; None if it must be sent."""
        if buffer is None or not self.codec.is_lossless:
            return None
        vector_offset, result_offset = buffer.offset_of(self._vector), buffer.offset_of(self._result)
        if vector_offset is None or result_offset is None:
            return None
        return 4 * send.lo + (vector_offset if send.phase is Phase.REDUCE and send.step == 0 else result_offset)

    def load(self, send: SendChunk, scratch: ScratchBuffers) -> memoryview:
        """The bytes to send; they do not change until `sent`."""
        if send.phase is Phase.REDUCE and send.step == 0:
            self._contribute(send.lo, send.hi)
        if self.codec.is_lossless or (send.phase is Phase.GATHER and send.step > 0):
            return self._in_result(send).data
        wire, span = self._scratch_wire(send, scratch), slice(send.lo, send.hi)
        self.codec.encode(self._result[span], self._residual[span], wire, scratch)
        return wire.data

    def sent(self, send: SendChunk, scratch: ScratchBuffers) -> None:
        """The bytes of `load` have been sent, or the chunk has been published."""
        self.sent_bytes += self.codec.wire_bytes(send.hi - send.lo)
        if send.phase is Phase.GATHER and not self.codec.is_lossless:
            if send.step == 0:
                self.codec.decode(self._scratch_wire(send, scratch), self._result[send.lo : send.hi])
            else:
                self._decode_in_place(send, scratch)
        self.ring.sent()

    def _contribute(self, lo: int, hi: int) -> None:
        """Start the sum with this member's share of its own vector."""
        for block in _blocks(lo, hi):
            np.multiply(self._vector[block], self._share, out=self._result[block])
            if not is_finite(self._result[block]):
                raise self._bad(self.spec.me, f"the contribution of {self.spec.me}")

    def _add(self, slot: Slot, received: Floats, scratch: ScratchBuffers | None = None) -> None:
        """Add this member's share to a partial sum. One check of the result covers both for finiteness.

        With `scratch`, `received` is the previous member's unscaled vector, and is multiplied with its share first.
        """
        for block in _blocks(slot.lo, slot.hi):
            result, partial = self._result[block], received[block.start - slot.lo : block.stop - slot.lo]
            with np.errstate(over="ignore", invalid="ignore"):
                if scratch is not None:
                    partial = np.multiply(partial, self._share_before, out=scratch.floats(0, partial.size))
                np.multiply(self._vector[block], self._share, out=result)
                np.add(result, partial, out=result)
            if is_finite(result):
                continue
            if not is_finite(partial):
                raise self._bad(self.spec.before, f"the partial sum from {self.spec.before}")
            raise self._bad(self.spec.me, f"the contribution of {self.spec.me}, or its sum with others,")

    def _copy(self, slot: Slot, published: Floats) -> None:
        for block in _blocks(slot.lo, slot.hi):
            np.copyto(self._result[block], published[block.start - slot.lo : block.stop - slot.lo])
            if not is_finite(self._result[block]):
                raise self._bad(self.spec.before, f"the average from {self.spec.before}")

    def _received(self, slot: Slot, scratch: ScratchBuffers) -> Floats:
        wire = self._scratch_wire(slot, scratch)
        if self.codec.is_lossless:
            return wire.view(np.float32)
        values = scratch.floats(0, slot.hi - slot.lo)
        self.codec.decode(wire, values)
        return values

    def _decode_in_place(self, span: Slot | SendChunk, scratch: ScratchBuffers) -> None:
        if not self.codec.is_lossless:
            wire = self._scratch_wire(span, scratch)
            np.copyto(wire, self._in_result(span))
            self.codec.decode(wire, self._result[span.lo : span.hi])

    def _scratch_wire(self, span: Slot | SendChunk, scratch: ScratchBuffers) -> Bytes:
        return scratch.wire(self.codec.wire_bytes(span.hi - span.lo))

    def _in_result(self, span: Slot | SendChunk) -> Bytes:
        """The encoded chunk, at the start of the memory of its elements."""
        elements: Bytes = self._result[span.lo : span.hi].view(np.uint8)
        return elements[: self.codec.wire_bytes(span.hi - span.lo)]

    def _bad(self, member: str, what: str) -> BadContribution:
        return BadContribution(self.spec.id, member, f"{what} is not finite")


def _sum_of_squares(values: Floats) -> float:
    return sum(float(np.square(values[block], dtype=np.float64).sum()) for block in _blocks(0, values.size))


def _blocks(lo: int, hi: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK_ELEMENTS, hi)) for start in range(lo, hi, _BLOCK_ELEMENTS))
