"""Encodes the values that stages exchange as message buffers, and decodes them.

Activations and their gradients (values with a gradient) may be compressed: to bfloat16, or to int8 with one float
scale per row, x ~ q * s with s = max|row| / 127, so that the error of an element is at most s / 2. Other values are
sent unchanged; numbers that the batch size determines are not sent. Sizes that vary with the length of the data are in
the message's header. Received buffers are reused when their microbatch is done, unless their sizes vary.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ravnest.errors import FrameError
from ravnest.graph import Stage, Value
from ravnest.graph.program import DTYPES, actual_shapes, varying_sizes

__all__ = ["TensorCodec", "StageCodecs", "as_bytes"]


class TensorCodec:
    """The buffers of one kind of message: `values` in order, with `compression` none, bf16 or int8.

    Messages are encoded and decoded on the device of their values; received ones are host memory, on request pinned.
    """

    def __init__(self, values: Iterable[Value], compression: str, *, max_batch: int, pinned: bool = False) -> None:
        self.values = tuple(values)
        self.compression = compression
        self.max_batch = max_batch
        self._is_pinned = pinned
        self.has_varying_sizes = any(value.varying for value in self.values)
        self._spare: defaultdict[tuple[torch.dtype, tuple[int, ...]], deque[Tensor]] = defaultdict(deque)

    def sizes(self, items: Sequence[Any]) -> tuple[int, ...]:
        """The sizes of `items` that the header of their message must have."""
        return varying_sizes(self.values, items) if self.has_varying_sizes else ()

    def allocate(self, batch: int, lengths: Sequence[int], sizes: Sequence[int] = ()) -> list[Tensor]:
        """Memory for a message of `batch` samples. Raises `FrameError` if its buffers have unexpected sizes."""
        if not 1 <= batch <= self.max_batch:
            raise FrameError(f"a microbatch must have 1 to {self.max_batch} samples, got {batch}")
        shapes = actual_shapes(self.values, batch, sizes)
        layouts = [x for value, shape in zip(self.values, shapes, strict=True) for x in self._layouts(value, shape)]
        expected = [prod(shape) * dtype.itemsize for dtype, shape in layouts]
        if expected != list(lengths):
            raise FrameError(f"buffers must have {expected!r:.100} bytes, got {list(lengths)!r:.100}")
        return [self._take(dtype, shape) for dtype, shape in layouts]

    def pack(self, items: Sequence[Any]) -> list[Tensor]:
        """Encode values as the buffers of a message."""
        buffers: list[Tensor] = []
        for value, item in zip(self.values, items, strict=True):
            if value.number is None:
                buffers += self._encode(value, item)
        return buffers

    def unpack(self, batch: int, buffers: Sequence[Tensor], sizes: Sequence[int] = ()) -> list[Any]:
        """Decode the buffers of a received message."""
        remaining = iter(buffers)
        shapes = actual_shapes(self.values, batch, sizes)
        return [
            shape[0] if value.number is not None else self._decode(value, remaining)
            for value, shape in zip(self.values, shapes, strict=True)
        ]

    def recycle(self, buffers: Iterable[Tensor]) -> None:
        """Reuse these received buffers for later messages."""
        if self.has_varying_sizes:  # a buffer of each size would be kept
            return
        for buffer in buffers:
            self._spare[buffer.dtype, tuple(buffer.shape)].append(buffer)

    def _take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        try:
            return self._spare[dtype, shape].popleft()
        except IndexError:
            return torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned)

    def _compression_of(self, value: Value) -> str:
        return self.compression if value.grad and value.dtype == "float32" and value.shape else "none"

    def _layouts(self, value: Value, shape: tuple[int, ...]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        if value.number is not None:
            return []
        match self._compression_of(value):
            case "bf16":
                return [(torch.bfloat16, shape)]
            case "int8":
                return [(torch.float32, (*shape[:-1], 1)), (torch.int8, shape)]
            case _:
                return [(DTYPES[value.dtype], shape)]

    def _encode(self, value: Value, item: Tensor | None) -> list[Tensor]:
        assert item is not None
        exact = item.detach().to(DTYPES[value.dtype])  # autocast may compute in another type than is declared
        match self._compression_of(value):
            case "bf16":
                return [exact.to(torch.bfloat16).contiguous()]
            case "int8":
                scale = exact.abs().amax(-1, keepdim=True).div_(127).clamp_min_(1e-30)
                return [scale, (exact / scale).round_().to(torch.int8).contiguous()]
            case _:
                return [exact.contiguous()]

    def _decode(self, value: Value, buffers: Any) -> Tensor:
        first: Tensor = next(buffers)
        match self._compression_of(value):
            case "bf16":
                return first.float()
            case "int8":
                quantised: Tensor = next(buffers)
                return quantised.float().mul_(first)
            case _:
                return first


@dataclass(frozen=True)
class StageCodecs:
    """The codecs of all messages of a stage."""

    inputs: TensorCodec
    outputs: TensorCodec
    gradients_in: TensorCodec
    gradients_out: TensorCodec

    @staticmethod
    def of(stage: Stage, compression: str, max_batch: int, *, pinned: bool = False) -> StageCodecs:
        """The codecs of a stage. The batch itself is never compressed, and no gradient of it is sent."""
        input_compression = "none" if stage.index == 0 else compression
        gradients = [v for v in stage.outputs if v.grad], [v for v in stage.inputs if v.grad]
        return StageCodecs(
            inputs=TensorCodec(stage.inputs, input_compression, max_batch=max_batch, pinned=pinned),
            outputs=TensorCodec(stage.outputs, compression, max_batch=max_batch),
            gradients_in=TensorCodec(gradients[0], compression, max_batch=max_batch, pinned=pinned),
            gradients_out=TensorCodec(gradients[1], input_compression, max_batch=max_batch),
        )


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return tensor.reshape(-1).view(torch.uint8).numpy().data
