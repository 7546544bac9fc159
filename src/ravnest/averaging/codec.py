"""Encodings of float32 vectors on the wire, with error feedback: the error of a lossy codec is added to the next send.

    fp32    4 bytes an element, exact
    bf16    2 bytes, rounded to nearest:                  |error| <= |v| / 2**8
    int8    1 byte and a float32 scale for each 256:      |error| <= max |v| of the block / 254
    int4    4 bits and a float32 scale for each 64:       |error| <= max |v| of the block / 14
    top16   the 16 largest of each 256, as bf16:          |error| <= max |v| of the block

int4 and top16 are for movements of weights, not for weights: what they do not send now, they send in later rounds.

Error feedback: v = value + residual is encoded and residual' = v - decoded. The sum of all values sent is then
the sum of all exact values, less one residual: over many rounds the mean error goes to 0.

In a ring of C members a sum is encoded at most C times, so the error of a result is at most C times the above, for
v = the sum of the absolute contributions, plus a little for the growth of v by earlier errors. Codecs with blocks send
a chunk of less than a block as fp32, because they would save little.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ravnest.core.config import require

__all__ = ["CODECS", "Bytes", "Codec", "ScratchBuffers", "Floats", "find_codec", "is_finite"]

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

BLOCK = 256
_INT4_BLOCK = 64
_TOP = 16  # elements of a block that are sent
_COLUMNS = 2048
_TINY = np.float32(1e-36)  # a smaller scale has no float32 inverse; such numbers are sent as 0 and stay in the residual


class ScratchBuffers:
    """Scratch memory of one thread; grows to the size of the largest chunk."""

    def __init__(self) -> None:
        self._floats: list[Floats] = [np.empty(0, np.float32) for _ in range(3)]

    def floats(self, which: int, num_elements: int) -> Floats:
        if self._floats[which].size < num_elements:
            self._floats[which] = np.empty(num_elements, np.float32)
        return self._floats[which][:num_elements]

    def wire(self, num_bytes: int) -> Bytes:
        """Memory for an encoded chunk, distinct from `floats` 0 and 1."""
        return self.floats(2, -(-num_bytes // 4)).view(np.uint8)[:num_bytes]


class Codec(Protocol):
    """An encoding of chunks."""

    name: str
    is_lossless: bool

    def wire_bytes(self, num_elements: int) -> int:
        """Bytes of an encoded chunk: at most 4 per element."""

    def encode(self, values: Floats, residual: Floats, wire: Bytes, scratch: ScratchBuffers) -> None:
        """Encode `values` + `residual`; the error becomes the new residual."""

    def decode(self, wire: Bytes, values: Floats) -> None: ...

    def is_finite(self, wire: Bytes, num_elements: int) -> bool:
        """Whether all numbers of an encoded chunk are finite."""


class Float32:
    """Unencoded float32."""

    name = "fp32"
    is_lossless = True

    def wire_bytes(self, num_elements: int) -> int:
        return 4 * num_elements

    def encode(self, values: Floats, residual: Floats, wire: Bytes, scratch: ScratchBuffers) -> None:
        np.add(values, residual, out=wire.view(np.float32))
        residual.fill(0)

    def decode(self, wire: Bytes, values: Floats) -> None:
        np.copyto(values, wire.view(np.float32))

    def is_finite(self, wire: Bytes, num_elements: int) -> bool:
        return is_finite(wire.view(np.float32))


class BFloat16:
    """The upper half of a float32, rounded to nearest, ties to even."""

    name = "bf16"
    is_lossless = False

    def wire_bytes(self, num_elements: int) -> int:
        return 2 * num_elements

    def encode(self, values: Floats, residual: Floats, wire: Bytes, scratch: ScratchBuffers) -> None:
        exact, rounded = scratch.floats(0, values.size), scratch.floats(1, values.size)
        np.add(values, residual, out=exact)
        bits = _round_to_bfloat16(exact, rounded)
        np.copyto(wire.view(np.uint16), bits, casting="unsafe")
        np.left_shift(bits, 16, out=bits)
        np.subtract(exact, rounded, out=residual)

    def decode(self, wire: Bytes, values: Floats) -> None:
        bits = values.view(np.uint32)
        np.copyto(bits, wire.view(np.uint16))
        np.left_shift(bits, 16, out=bits)

    def is_finite(self, wire: Bytes, num_elements: int) -> bool:
        """Infinities and NaNs have an exponent of all ones."""
        return int(np.bitwise_and(wire.view(np.uint16), 0x7F80).max(initial=0)) < 0x7F80


class Int8:
    """A float32 scale per block of 256 elements, then one byte per element."""

    name = "int8"
    is_lossless = False

    def wire_bytes(self, num_elements: int) -> int:
        if num_elements < BLOCK:
            return 4 * num_elements
        return num_elements + 4 * -(-num_elements // BLOCK)

    def encode(self, values: Floats, residual: Floats, wire: Bytes, scratch: ScratchBuffers) -> None:
        if values.size < BLOCK:
            FLOAT32.encode(values, residual, wire, scratch)
            return
        num_blocks = -(-values.size // BLOCK)
        exact, scaled = scratch.floats(0, num_blocks * BLOCK), scratch.floats(1, num_blocks * BLOCK)
        np.add(values, residual, out=exact[: values.size])
        exact[values.size :] = 0
        scales = wire[: 4 * num_blocks].view(np.float32)
        np.abs(exact, out=scaled)
        np.max(scaled.reshape(num_blocks, BLOCK), axis=1, out=scales)
        np.divide(scales, np.float32(127), out=scales)
        scales[scales < _TINY] = 0
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        np.multiply(exact.reshape(num_blocks, BLOCK), inverse[:, None], out=scaled.reshape(num_blocks, BLOCK))
        np.rint(scaled, out=scaled)
        np.copyto(wire[4 * num_blocks :].view(np.int8), scaled[: values.size], casting="unsafe")
        np.multiply(scaled.reshape(num_blocks, BLOCK), scales[:, None], out=scaled.reshape(num_blocks, BLOCK))
        np.subtract(exact[: values.size], scaled[: values.size], out=residual)

    def decode(self, wire: Bytes, values: Floats) -> None:
        if values.size < BLOCK:
            FLOAT32.decode(wire, values)
            return
        num_blocks, whole = -(-values.size // BLOCK), values.size // BLOCK
        scales, quantized = wire[: 4 * num_blocks].view(np.float32), wire[4 * num_blocks :].view(np.int8)
        full = values[: whole * BLOCK].reshape(whole, BLOCK)
        np.multiply(quantized[: whole * BLOCK].reshape(whole, BLOCK), scales[:whole, None], out=full)
        np.multiply(quantized[whole * BLOCK :], scales[-1], out=values[whole * BLOCK :])

    def is_finite(self, wire: Bytes, num_elements: int) -> bool:
        if num_elements < BLOCK:
            return is_finite(wire.view(np.float32))
        scales = wire[: 4 * -(-num_elements // BLOCK)].view(np.float32)
        return bool(np.all(np.abs(scales) <= np.finfo(np.float32).max / 128))


class Int4:
    """A float32 scale per block of 64 elements, then half a byte per element; the last block is padded with zeros."""

    name = "int4"
    is_lossless = False

    def wire_bytes(self, num_elements: int) -> int:
        if num_elements < _INT4_BLOCK:
            return 4 * num_elements
        return (4 + _INT4_BLOCK // 2) * -(-num_elements // _INT4_BLOCK)

    def encode(self, values: Floats, residual: Floats, wire: Bytes, scratch: ScratchBuffers) -> None:
        if values.size < _INT4_BLOCK:
            FLOAT32.encode(values, residual, wire, scratch)
            return
        num_blocks = -(-values.size // _INT4_BLOCK)
        exact, scaled = (scratch.floats(i, num_blocks * _INT4_BLOCK).reshape(num_blocks, _INT4_BLOCK) for i in (0, 1))
        _add_padded(values, residual, exact)
        scales = wire[: 4 * num_blocks].view(np.float32)
        np.divide(np.abs(exact).max(axis=1), np.float32(7), out=scales)
        scales[scales < _TINY] = 0
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        np.rint(np.multiply(exact, inverse[:, None], out=scaled), out=scaled)
        codes = (scaled + 8).astype(np.uint8)
        np.bitwise_or(codes[:, ::2], codes[:, 1::2] << 4, out=wire[4 * num_blocks :].reshape(num_blocks, -1))
        np.multiply(scaled, scales[:, None], out=scaled)
        np.subtract(exact.reshape(-1)[: values.size], scaled.reshape(-1)[: values.size], out=residual)

    def decode(self, wire: Bytes, values: Floats) -> None:
        if values.size < _INT4_BLOCK:
            FLOAT32.decode(wire, values)
            return
        num_blocks = -(-values.size // _INT4_BLOCK)
        pairs = wire[4 * num_blocks :].reshape(num_blocks, -1)
        codes = np.stack((pairs & 15, pairs >> 4), axis=2).reshape(num_blocks, _INT4_BLOCK).astype(np.float32) - 8
        codes *= wire[: 4 * num_blocks].view(np.float32)[:, None]
        np.copyto(values, codes.reshape(-1)[: values.size])

    def is_finite(self, wire: Bytes, num_elements: int) -> bool:
        if num_elements < _INT4_BLOCK:
            return is_finite(wire.view(np.float32))
        scales = wire[: 4 * -(-num_elements // _INT4_BLOCK)].view(np.float32)
        return bool(np.all(np.abs(scales) <= np.finfo(np.float32).max / 16))


class Top16:
    """The 16 elements with the largest magnitude of each block of 256: as bfloat16, then their places in the block."""

    name = "top16"
    is_lossless = False

    def wire_bytes(self, num_elements: int) -> int:
        return 4 * num_elements if num_elements < BLOCK else 3 * _TOP * -(-num_elements // BLOCK)

    def encode(self, values: Floats, residual: Floats, wire: Bytes, scratch: ScratchBuffers) -> None:
        if values.size < BLOCK:
            FLOAT32.encode(values, residual, wire, scratch)
            return
        num_blocks = -(-values.size // BLOCK)
        exact = scratch.floats(0, num_blocks * BLOCK).reshape(num_blocks, BLOCK)
        _add_padded(values, residual, exact)
        places = np.argpartition(np.abs(exact), BLOCK - _TOP, axis=1)[:, BLOCK - _TOP :]
        places.sort(axis=1)
        largest = np.take_along_axis(exact, places, axis=1)
        bits = _round_to_bfloat16(largest, np.empty_like(largest))
        np.copyto(wire[: 2 * _TOP * num_blocks].view(np.uint16).reshape(num_blocks, _TOP), bits, casting="unsafe")
        np.copyto(wire[2 * _TOP * num_blocks :].reshape(num_blocks, _TOP), places, casting="unsafe")
        np.left_shift(bits, 16, out=bits)
        np.put_along_axis(exact, places, largest - bits.view(np.float32), axis=1)
        np.copyto(residual, exact.reshape(-1)[: values.size])

    def decode(self, wire: Bytes, values: Floats) -> None:
        if values.size < BLOCK:
            FLOAT32.decode(wire, values)
            return
        num_blocks = -(-values.size // BLOCK)
        bits = wire[: 2 * _TOP * num_blocks].view(np.uint16).astype(np.uint32) << 16
        places = wire[2 * _TOP * num_blocks :].reshape(num_blocks, _TOP).astype(np.intp)
        blocks = np.zeros((num_blocks, BLOCK), np.float32)
        np.put_along_axis(blocks, places, bits.view(np.float32).reshape(num_blocks, _TOP), axis=1)
        np.copyto(values, blocks.reshape(-1)[: values.size])

    def is_finite(self, wire: Bytes, num_elements: int) -> bool:
        if num_elements < BLOCK:
            return is_finite(wire.view(np.float32))
        bits = wire[: 2 * _TOP * -(-num_elements // BLOCK)].view(np.uint16)
        return int(np.bitwise_and(bits, 0x7F80).max(initial=0)) < 0x7F80


def _add_padded(values: Floats, residual: Floats, blocks: Floats) -> None:
    """Write `values` + `residual` into blocks, whose last elements become zeros."""
    flat = blocks.reshape(-1)
    np.add(values, residual, out=flat[: values.size])
    flat[values.size :] = 0


def _round_to_bfloat16(exact: Floats, memory: Floats) -> npt.NDArray[np.uint32]:
    """The upper halves of these numbers, rounded to nearest, ties to even, in `memory`."""
    bits = memory.view(np.uint32)
    np.right_shift(exact.view(np.uint32), 16, out=bits)
    np.bitwise_and(bits, 1, out=bits)
    np.add(bits, 0x7FFF, out=bits)
    np.add(bits, exact.view(np.uint32), out=bits)
    return np.right_shift(bits, 16, out=bits)


FLOAT32 = Float32()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (FLOAT32, BFloat16(), Int8(), Int4(), Top16())}


def find_codec(name: str) -> Codec:
    """The codec of this name."""
    require(name in CODECS, f"codec must be one of {', '.join(CODECS)}, got {name!r}")
    return CODECS[name]


def is_finite(values: Floats) -> bool:
    """Whether all values are finite. A finite sum proves it; only if the sum is not finite, each value is checked."""
    whole = values.size // _COLUMNS * _COLUMNS
    with np.errstate(over="ignore", invalid="ignore"):
        columns = np.add.reduce(values[:whole].reshape(-1, _COLUMNS), axis=0)
        return math.isfinite(columns.sum() + values[whole:].sum()) or bool(np.isfinite(values).all())
