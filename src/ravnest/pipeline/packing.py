"""Float32 tensors in one byte per element, for optimizer state and for differences of weights.

A tensor is packed in blocks of 256 elements, each with a float32 scale s; its largest element has the largest code q:

    linear      x = s * q                -127 <= q <= 127      the last update, the offset of the compute weights
    signed      x = s * q * |q|          -127 <= q <= 127      first moments: a wider range than linear
    positive    x = s * (q + 128)**4     -125 <= q <= 127      second moments: never 0, updates are divided by them

A second moment changes by about a thousandth per update, which is less than the distance of two codes. It is rounded up
or down at random, in proportion to the distance, so that small changes add up. The random numbers come from a fixed
table, at a place that depends on the tensor's name and the number of the update: a repeated run rounds in the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.graph.device import CPU

__all__ = [
    "FORMS",
    "PACKED_BYTES",
    "SCALE",
    "PackedTensor",
    "chunks",
    "noise",
    "num_blocks",
    "pack",
    "packed_state",
    "scratch",
    "unpack_state",
]

Form = Literal["linear", "signed", "positive"]

FORMS: dict[str, Form] = {
    "exp_avg": "signed", "momentum_buffer": "signed", "exp_avg_sq": "positive", "max_exp_avg_sq": "positive",
}  # fmt: skip
SCALE = "_scale"  # ends the key of a packed tensor's scales
BLOCK = 256
PACKED_BYTES = 1 + 4 / BLOCK
CHUNK = 2**18  # elements that are updated together, so that temporary tensors stay small and in the cache
_OFFSETS = 2**16
_TINY = 1e-38
_ROUND = torch.tensor(0.5 - 128.0)  # to the nearest code, instead of a random number


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements, each but the last of `CHUNK` elements."""
    return ((lo, min(lo + CHUNK, numel)) for lo in range(0, numel, CHUNK))


class PackedTensor:
    """A packed tensor of a given shape: zeros on `device`, or given `values` and `scales`, which it then owns.

    Raises `WeightsError` if these do not fit the shape.
    """

    def __init__(
        self,
        form: Form,
        shape: tuple[int, ...],
        values: Tensor | None = None,
        scales: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.form, self.shape = form, torch.Size(shape)
        self.numel = self.shape.numel()
        blocks = num_blocks(self.numel)
        if values is None or scales is None:
            self._codes = torch.zeros(blocks * BLOCK, dtype=torch.int8, device=device)
            self.scales = torch.zeros(blocks, device=device)
            return
        if values.dtype != torch.int8 or values.shape != self.shape:
            raise WeightsError(
                f"packed values must be int8 of shape {list(shape)}, got {values.dtype} of {list(values.shape)}"
            )
        if scales.dtype != torch.float32 or tuple(scales.shape) != (blocks,):
            raise WeightsError(
                f"scales must be float32 of shape [{blocks}], got {scales.dtype} of {list(scales.shape)}"
            )
        flat, padding = values.detach().reshape(-1), blocks * BLOCK - self.numel
        self._codes = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
        self.scales = scales.detach()

    @property
    def values(self) -> Tensor:
        """The codes in the tensor's shape; not a copy."""
        return self._codes[: self.numel].view(self.shape)

    def read(self, lo: int, hi: int, into: int | None = None) -> Tensor:
        """The flat elements from `lo`, a multiple of the block size, to `hi`, as a new float32 tensor.

        With `into` they are in that scratch buffer instead.
        """
        first, end = lo // BLOCK, num_blocks(hi)
        codes = self._codes[first * BLOCK : end * BLOCK]
        device = codes.device
        x = torch.empty(codes.numel(), device=device) if into is None else scratch(into, codes.numel(), device)
        x.copy_(codes)
        if self.form == "signed":
            x.mul_(torch.abs(x, out=scratch(0, x.numel(), device)))
        elif self.form == "positive":
            x.add_(128.0).square_().square_()
        x.view(-1, BLOCK).mul_(self.scales[first:end, None])
        return x[: hi - lo]

    def write(self, lo: int, hi: int, x: Tensor, random: Tensor | None = None) -> None:
        """Replace the flat elements from `lo` to `hi`; `random` has a number of `noise` for each, or more."""
        first, end = lo // BLOCK, num_blocks(hi)
        padding = (end - first) * BLOCK - (hi - lo)
        blocks = (torch.nn.functional.pad(x, (0, padding)) if padding else x).view(-1, BLOCK)
        codes = scratch(0, blocks.numel(), x.device).view(-1, BLOCK)
        match self.form:
            case "linear":
                largest = torch.abs(blocks, out=codes).amax(1, keepdim=True).clamp_(min=_TINY)
                torch.mul(blocks, 127.0 / largest, out=codes).round_()
                per_code = 1 / 127
            case "signed":  # x / sqrt(|x| * largest)
                largest = torch.abs(blocks, out=codes).amax(1, keepdim=True).clamp_(min=_TINY)
                codes.mul_(largest).clamp_(min=_TINY).rsqrt_().mul_(blocks).mul_(127.0).round_()
                per_code = 1 / 127**2
            case "positive":
                largest = blocks.amax(1, keepdim=True).clamp_(min=_TINY)
                shift = _ROUND if random is None else random[: codes.numel()].view_as(codes)
                torch.div(blocks, largest, out=codes).sqrt_().sqrt_()
                torch.add(shift, codes, alpha=255.0, out=codes).floor_().clamp_(-125.0, 127.0)
                per_code = 1 / 255**4
        torch.mul(largest, per_code, out=self.scales[first:end, None])
        self._codes[first * BLOCK : end * BLOCK].copy_(codes.view(-1))

    def fill_zero(self) -> None:
        self._codes.zero_()
        self.scales.zero_()

    def unpacked(self) -> Tensor:
        return self.read(0, self.numel).view(self.shape)


def pack(form: Form, tensor: Tensor) -> PackedTensor:
    """Pack a float32 tensor."""
    packed, flat = PackedTensor(form, tuple(tensor.shape), device=tensor.device), tensor.detach().reshape(-1)
    for lo, hi in chunks(flat.numel()):
        packed.write(lo, hi, flat[lo:hi])
    return packed


def packed_state(entries: Mapping[str, Tensor]) -> dict[str, PackedTensor | Tensor]:
    """The optimizer state of a parameter by key, with codes and scales together; float32 tensors stay as they are."""
    result: dict[str, PackedTensor | Tensor] = {}
    for key, tensor in entries.items():
        if key in FORMS and key + SCALE in entries:
            result[key] = PackedTensor(FORMS[key], tuple(tensor.shape), tensor, entries[key + SCALE])
        elif key.removesuffix(SCALE) not in FORMS or key in FORMS:
            result[key] = tensor
    return result


def unpack_state(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer state of a parameter by key, with packed tensors as float32."""
    return {key: t.unpacked() if isinstance(t, PackedTensor) else t for key, t in packed_state(entries).items()}


def noise(name: str, number: int, lo: int, device: torch.device = CPU) -> Tensor:
    """`CHUNK` numbers to add to the codes of the chunk at `lo` of the tensor `name` in update `number`.

    They are random numbers in [0, 1), minus the 128 that codes of the form `positive` are shifted by.
    """
    offset = crc32(f"{name} {number} {lo}".encode()) % _OFFSETS
    return _random_table(device)[offset : offset + CHUNK]


@cache
def _random_table(device: torch.device) -> Tensor:
    """The same numbers on every device."""
    return (torch.rand(CHUNK + _OFFSETS, generator=torch.Generator().manual_seed(0x5EED)) - 128.0).to(device)


_scratch = threading.local()


def scratch(index: int, numel: int, device: torch.device) -> Tensor:
    """Float32 memory that is reused, so that temporary tensors stay in the cache. Each thread has its own.

    Index 0 is used by `PackedTensor` itself.
    """
    if numel > CHUNK:
        return torch.empty(numel, device=device)
    buffers: dict[tuple[int, torch.device], Tensor] = _scratch.__dict__.setdefault("buffers", {})
    if (index, device) not in buffers:
        buffers[index, device] = torch.empty(CHUNK, device=device)
    return buffers[index, device][:numel]
