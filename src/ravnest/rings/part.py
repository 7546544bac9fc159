"""One member's part in one ring: the numbers that belong to what `Ring` decides. No threads, no clock, no I/O.

`vector` is what the member contributes and is only read; the average grows in `result`, piece by piece. (They may be
the same memory, if no second attempt will be made.) Nothing is copied that need not be: fp32 pieces are sent from
`result`, and gathered pieces of any form arrive in `result` itself. One that is to be passed on stays there as it came,
encoded, until it has been sent, and is decoded in place then: every member decodes the same bytes, also the one that
encoded them. Between members of one host even that copy is saved: pieces of a `result` that lies in a window are
lent, and the next member adds them from where they are; of what is a member's own, `vector` is lent as it is.

One thread receives (`room`, then `take`), one sends (`load`, then `sent`); each brings a `Desk` of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ravnest.core.config import require
from ravnest.core.errors import FrameError
from ravnest.rings.codec import Bytes, Desk, Floats, find_codec, is_finite
from ravnest.rings.errors import BadContribution
from ravnest.rings.messages import Piece
from ravnest.rings.ring import Phase, Ring, Send, Slot
from ravnest.rings.spec import RingSpec
from ravnest.rings.window import Window

__all__ = ["Part", "codec_error", "new_residual"]

_BLOCK = 2**17  # elements that are worked on together: what was just written is looked at in the cache


def new_residual(spec: RingSpec, num_elements: int) -> Floats:
    """What error feedback starts from: zeros; none are needed where nothing is lost."""
    return np.zeros(0 if find_codec(spec.codec).is_lossless else num_elements, np.float32)


def codec_error(parts: Sequence[Part]) -> float:
    """What a codec lost at this member in a round and owes the next, over the averages, both as root mean squares."""
    lost = sum(_squares(part.residual) for part in parts if not part.codec.is_lossless)
    whole = sum(_squares(part.result) for part in parts if not part.codec.is_lossless)
    return math.sqrt(lost / whole) if whole > 0 else 0.0


class Part:
    """`residual` is the error feedback of this member: it is changed, and carries over to the next round.

    A failed attempt leaves its own errors in place of those it had used up. That is wrong once, by no more than the
    codec's error, and saves a second copy.
    """

    def __init__(self, spec: RingSpec, vector: Floats, result: Floats, residual: Floats | None = None) -> None:
        for what, array in (("vector", vector), ("result", result)):
            require(array.dtype == np.float32 and array.ndim == 1, f"the {what} of ring {spec.id} is flat and float32")
            require(array.flags.c_contiguous, f"the {what} of ring {spec.id} lies in one stretch of memory")
        require(vector.size == result.size, f"vector and result of ring {spec.id} have one size")
        self.spec, self.codec = spec, find_codec(spec.codec)
        self._vector, self._result = vector, result
        self._share, self._share_before = np.float32(spec.share), np.float32(spec.share_before)
        self._residual = new_residual(spec, vector.size) if residual is None else residual
        wanted = 0 if self.codec.is_lossless else vector.size
        require(self._residual.size in (wanted, vector.size), f"the residual of ring {spec.id} has one number for each")
        self.ring = Ring(spec.position, len(spec.members), vector.size, spec.piece_elements)
        self.sent_bytes = 0

    @property
    def result(self) -> Floats:
        return self._result

    @property
    def residual(self) -> Floats:
        return self._residual

    def begin(self) -> tuple[Send, ...]:
        """What can be sent at once. A ring of one has its result."""
        if len(self.spec.members) == 1:
            self._contribute(0, self._vector.size)
        return self.ring.begin()

    def check(self, piece: Piece, lengths: tuple[int, ...]) -> Slot:
        """The slot of a piece that is about to arrive; refuses any but the next, of the right size."""
        slot = self.ring.check(piece.phase, piece.step, piece.index)
        if piece.at is not None and not self.codec.is_lossless:
            raise FrameError(f"a piece of ring {self.spec.id} is lent, which is for numbers that are not encoded")
        expected = (self.codec.wire_bytes(slot.hi - slot.lo),) if piece.at is None else ()
        if lengths != expected:
            raise FrameError(f"a piece of ring {self.spec.id} has {lengths} bytes where {expected} are expected")
        return slot

    def room(self, slot: Slot, desk: Desk) -> memoryview:
        """Where the bytes of the piece belong."""
        return (self._on_desk(slot, desk) if slot.phase is Phase.REDUCE else self._in_result(slot)).data

    def take(self, slot: Slot, desk: Desk, lent: Floats | None = None) -> Send | None:
        """The piece is in its room, or lent by the member before: add or keep it; what to send on."""
        if slot.phase is Phase.REDUCE and lent is not None:
            self._add(slot, lent, desk if slot.step == 0 else None)
        elif slot.phase is Phase.REDUCE:
            self._add(slot, self._received(slot, desk))
        elif lent is not None:
            self._copy(slot, lent)
        elif not self.codec.is_finite(self._in_result(slot), slot.hi - slot.lo):
            raise self._bad(self.spec.before, f"{self.spec.before} handed round")
        onward = self.ring.arrived(slot.phase, slot.step, slot.number)[1:]
        for send in onward:
            assert isinstance(send, Send)
            return send
        self._unpack(slot, desk)
        return None

    def lent_at(self, send: Send, window: Window | None) -> int | None:
        """The byte of the window at which the next member finds the piece; None if it must be sent."""
        if window is None or not self.codec.is_lossless:
            return None
        vector_at, result_at = window.find(self._vector), window.find(self._result)
        if vector_at is None or result_at is None:
            return None
        return 4 * send.lo + (vector_at if send.phase is Phase.REDUCE and send.step == 0 else result_at)

    def load(self, send: Send, desk: Desk) -> memoryview:
        """The bytes to send; they stay as they are until `sent`."""
        if send.phase is Phase.REDUCE and send.step == 0:
            self._contribute(send.lo, send.hi)
        if self.codec.is_lossless or (send.phase is Phase.GATHER and send.step > 0):
            return self._in_result(send).data
        wire, span = self._on_desk(send, desk), slice(send.lo, send.hi)
        self.codec.encode(self._result[span], self._residual[span], wire, desk)
        return wire.data

    def sent(self, send: Send, desk: Desk) -> None:
        """The bytes of `load` have gone."""
        self.sent_bytes += self.codec.wire_bytes(send.hi - send.lo)
        if send.phase is Phase.GATHER and not self.codec.is_lossless:
            if send.step == 0:
                self.codec.decode(self._on_desk(send, desk), self._result[send.lo : send.hi])
            else:
                self._unpack(send, desk)
        self.ring.sent()

    def _contribute(self, lo: int, hi: int) -> None:
        """This member's share of its own vector, before anything is added."""
        for block in _blocks(lo, hi):
            np.multiply(self._vector[block], self._share, out=self._result[block])
            if not is_finite(self._result[block]):
                raise self._bad(self.spec.me, f"{self.spec.me} contributes")

    def _add(self, slot: Slot, received: Floats, desk: Desk | None = None) -> None:
        """The sum so far plus this member's share. One look at the result tells of both whether they are finite.

        With a `desk`, what was received is a vector as it is, of which the member before has a share too.
        """
        for block in _blocks(slot.lo, slot.hi):
            result, so_far = self._result[block], received[block.start - slot.lo : block.stop - slot.lo]
            with np.errstate(over="ignore", invalid="ignore"):
                if desk is not None:
                    so_far = np.multiply(so_far, self._share_before, out=desk.floats(0, so_far.size))
                np.multiply(self._vector[block], self._share, out=result)
                np.add(result, so_far, out=result)
            if is_finite(result):
                continue
            if not is_finite(so_far):
                raise self._bad(self.spec.before, f"{self.spec.before} passed on")
            raise self._bad(self.spec.me, f"{self.spec.me} contributes, or a sum too large,")

    def _copy(self, slot: Slot, lent: Floats) -> None:
        for block in _blocks(slot.lo, slot.hi):
            np.copyto(self._result[block], lent[block.start - slot.lo : block.stop - slot.lo])
            if not is_finite(self._result[block]):
                raise self._bad(self.spec.before, f"{self.spec.before} handed round")

    def _received(self, slot: Slot, desk: Desk) -> Floats:
        wire = self._on_desk(slot, desk)
        if self.codec.is_lossless:
            return wire.view(np.float32)
        values = desk.floats(0, slot.hi - slot.lo)
        self.codec.decode(wire, values)
        return values

    def _unpack(self, span: Slot | Send, desk: Desk) -> None:
        """Decode a gathered piece where it lies."""
        if not self.codec.is_lossless:
            wire = self._on_desk(span, desk)
            np.copyto(wire, self._in_result(span))
            self.codec.decode(wire, self._result[span.lo : span.hi])

    def _on_desk(self, span: Slot | Send, desk: Desk) -> Bytes:
        return desk.wire(self.codec.wire_bytes(span.hi - span.lo))

    def _in_result(self, span: Slot | Send) -> Bytes:
        """The beginning of the piece's own elements, as bytes."""
        whole: Bytes = self._result[span.lo : span.hi].view(np.uint8)
        return whole[: self.codec.wire_bytes(span.hi - span.lo)]

    def _bad(self, member: str, who: str) -> BadContribution:
        return BadContribution(self.spec.id, member, f"what {who} is infinite or not a number")


def _squares(values: Floats) -> float:
    return sum(float(np.square(values[block], dtype=np.float64).sum()) for block in _blocks(0, values.size))


def _blocks(lo: int, hi: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, hi)) for start in range(lo, hi, _BLOCK))
