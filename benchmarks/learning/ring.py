"""Averages vectors with the arithmetic, the order and the codecs of the rings, without links."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from ravnest.averaging.codec import Floats, ScratchBuffers
from ravnest.averaging.contribution import Contribution, new_residual
from ravnest.averaging.ring import RingSpec, SendChunk
from ravnest.protocol.averaging import Chunk

__all__ = ["ring_average"]


def ring_average(vectors: Sequence[Floats], codec: str, residuals: list[Floats]) -> tuple[Floats, int]:
    """The average with equal weights, and the bytes sent. `residuals` are kept from round to round, first empty."""
    names = tuple(map(str, range(len(vectors))))
    specs = [RingSpec(id=0, members=names, me=name, weights=(1.0,) * len(names), codec=codec) for name in names]
    kept = residuals if codec != "fp32" else []
    if not kept:
        kept.extend(new_residual(spec, vector.size) for spec, vector in zip(specs, vectors, strict=True))
    members = [
        Contribution(spec, vector, np.empty_like(vector), residual)
        for spec, vector, residual in zip(specs, vectors, kept, strict=True)
    ]
    scratch, sends = ScratchBuffers(), deque[tuple[int, SendChunk]]()
    for index, member in enumerate(members):
        sends.extend((index, chunk) for chunk in member.begin())
    while sends:
        index, send = sends.popleft()
        following = _pass_on(members[index], members[(index + 1) % len(members)], send, scratch)
        if following is not None:
            sends.append(((index + 1) % len(members), following))
    return members[0].result, sum(member.sent_bytes for member in members)


def _pass_on(
    sender: Contribution, receiver: Contribution, send: SendChunk, scratch: ScratchBuffers
) -> SendChunk | None:
    """Send a chunk from one member to the next; returns the chunk that the receiver sends then."""
    wire = bytes(sender.load(send, scratch))
    sender.sent(send, scratch)
    slot = receiver.check(
        Chunk(round=0, attempt=0, ring=0, phase=send.phase, step=send.step, index=send.number), (len(wire),)
    )
    receiver.receive_buffer(slot, scratch)[:] = wire
    return receiver.take(slot, scratch)
