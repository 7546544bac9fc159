"""Values as they travel between stages: which buffers a message has, and values into buffers and back.

Activations and their gradients (values with a gradient) may be compressed: to bfloat16, or to int8 with one float
scale per row, x ~ q * s with s = max|row| / 127, so no element is off by more than s / 2. All else travels as it is;
numbers that the batch determines do not travel at all. Received buffers are used again when their microbatch is done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.errors import FrameError
from ..graph import Stage, Value
from ..graph.program import DTYPES, resolve_dim

__all__ = ["Freight", "Freights", "as_bytes"]


class Freight:
    """The form of one kind of message: `values` in order, compressed as `compression` says."""

    def __init__(self, values: Iterable[Value], compression: str, *, max_batch: int) -> None:
        self.values = tuple(values)
        self.compression = compression
        self.max_batch = max_batch
        self._spare: defaultdict[tuple[torch.dtype, tuple[int, ...]], deque[Tensor]] = defaultdict(deque)

    def allocate(self, batch: int, lengths: Sequence[int]) -> list[Tensor]:
        """Memory for a message of `batch` samples, refused if its buffers are not those that we expect."""
        if not 1 <= batch <= self.max_batch:
            raise FrameError(f"a microbatch of {batch} samples was announced, at most {self.max_batch} are expected")
        forms = [form for value in self.values for form in self._forms(value, batch)]
        expected = [prod(shape) * dtype.itemsize for dtype, shape in forms]
        if expected != list(lengths):
            raise FrameError(f"buffers of {list(lengths)!r:.100} bytes were announced, {expected!r:.100} are expected")
        return [self._take(dtype, shape) for dtype, shape in forms]

    def pack(self, items: Sequence[Any]) -> list[Tensor]:
        """The buffers of a message with these values."""
        buffers: list[Tensor] = []
        for value, item in zip(self.values, items, strict=True):
            if value.number is None:
                buffers += self._encode(value, item)
        return buffers

    def unpack(self, batch: int, buffers: Sequence[Tensor]) -> list[Any]:
        """The values of a message that arrived."""
        left = iter(buffers)
        return [
            resolve_dim(value.number, batch) if value.number is not None else self._decode(value, left)
            for value in self.values
        ]

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        """Received buffers that nobody reads any more."""
        for buffer in buffers:
            self._spare[buffer.dtype, tuple(buffer.shape)].append(buffer)

    def _take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        try:
            return self._spare[dtype, shape].popleft()
        except IndexError:
            return torch.empty(shape, dtype=dtype)

    def _compresses(self, value: Value) -> str:
        return self.compression if value.grad and value.dtype == "float32" and value.shape else "none"

    def _forms(self, value: Value, batch: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        if value.number is not None:
            return []
        shape = tuple(resolve_dim(d, batch) for d in value.shape)
        match self._compresses(value):
            case "bf16":
                return [(torch.bfloat16, shape)]
            case "int8":
                return [(torch.float32, (*shape[:-1], 1)), (torch.int8, shape)]
            case _:
                return [(DTYPES[value.dtype], shape)]

    def _encode(self, value: Value, item: Tensor | None) -> list[Tensor]:
        assert item is not None
        match self._compresses(value):
            case "bf16":
                return [item.detach().to(torch.bfloat16).contiguous()]
            case "int8":
                scale = item.detach().abs().amax(-1, keepdim=True).div_(127).clamp_min_(1e-30)
                return [scale, (item.detach() / scale).round_().to(torch.int8).contiguous()]
            case _:
                return [item.detach().contiguous().cpu()]

    def _decode(self, value: Value, buffers: Any) -> Tensor:
        first: Tensor = next(buffers)
        match self._compresses(value):
            case "bf16":
                return first.float()
            case "int8":
                quantised: Tensor = next(buffers)
                return quantised.float().mul_(first)
            case _:
                return first


@dataclass(frozen=True)
class Freights:
    """The forms of all messages of a stage."""

    inputs: Freight
    outputs: Freight
    gradients_in: Freight
    gradients_out: Freight

    @staticmethod
    def of(stage: Stage, compression: str, max_batch: int) -> Freights:
        """The batch itself is never compressed, nor does a gradient of it go back."""
        into = "none" if stage.index == 0 else compression
        gradients = [v for v in stage.outputs if v.grad], [v for v in stage.inputs if v.grad]
        return Freights(
            inputs=Freight(stage.inputs, into, max_batch=max_batch),
            outputs=Freight(stage.outputs, compression, max_batch=max_batch),
            gradients_in=Freight(gradients[0], compression, max_batch=max_batch),
            gradients_out=Freight(gradients[1], into, max_batch=max_batch),
        )


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return tensor.reshape(-1).view(torch.uint8).numpy().data
