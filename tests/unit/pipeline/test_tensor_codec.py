"""Encoding of values as buffers, and buffers of unexpected sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravnest.errors import FrameError
from ravnest.graph import Value
from ravnest.pipeline.tensor_codec import TensorCodec, as_bytes

VALUES = (
    Value("x", "float32", ((1, 0), 5), grad=True),
    Value("ids", "int64", ((1, 0), 3)),
    Value("n", "int", number=(2, 1)),
    Value("flag", "bool", ()),
)


def items(batch: int) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 5, generator=generator) * 10
    return [x, torch.arange(batch * 3).view(batch, 3), 2 * batch + 1, torch.tensor(True)]


@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
@given(batch=st.integers(1, 9))
def test_round_trip(compression: str, batch: int) -> None:
    codec = TensorCodec(VALUES, compression, max_batch=9)
    sent = codec.pack(items(batch))
    received = codec.allocate(batch, [len(as_bytes(t)) for t in sent])
    for source, target in zip(sent, received, strict=True):
        as_bytes(target)[:] = as_bytes(source)
    x, ids, n, flag = codec.unpack(batch, received)
    original = items(batch)
    assert torch.equal(ids, original[1])
    assert n == original[2]
    assert torch.equal(flag, original[3])
    error = (x - original[0]).abs()
    row = original[0].abs().amax(-1, keepdim=True)
    limit = {"none": 0.0, "bf16": 2**-8, "int8": 0.5001 / 127}[compression]
    assert (error <= row * limit).all()


def test_a_row_of_zeros_stays_zero() -> None:
    codec = TensorCodec(VALUES[:1], "int8", max_batch=4)
    assert torch.equal(codec.unpack(2, codec.pack([torch.zeros(2, 5)]))[0], torch.zeros(2, 5))


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        (0, []),
        (-1, []),
        (10, [200, 240, 1]),
        (2, []),
        (2, [40, 48]),
        (2, [40, 48, 2]),
        (2, [10**12, 48, 1]),
        (2, [48, 40, 1]),
    ],
)
def test_unexpected_sizes_are_rejected(batch: int, lengths: list[int]) -> None:
    with pytest.raises(FrameError):
        TensorCodec(VALUES, "none", max_batch=9).allocate(batch, lengths)


def test_buffers_are_reused() -> None:
    codec = TensorCodec(VALUES[:1], "none", max_batch=9)
    (first,) = codec.allocate(3, [60])
    codec.recycle([first])
    (second,) = codec.allocate(3, [60])
    (other,) = codec.allocate(3, [60])
    assert second.data_ptr() == first.data_ptr() != other.data_ptr()
    assert codec.allocate(2, [40])[0].shape == (2, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64])
def test_as_bytes(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (0, 4), (2, 3)):
        tensor = torch.ones(shape, dtype=dtype)
        assert len(as_bytes(tensor)) == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_autocast_are_sent_as_declared(dtype: torch.dtype, compression: str) -> None:
    codec = TensorCodec(VALUES, compression, max_batch=9)
    x, *others = items(2)
    sent = codec.pack([x.to(dtype), *others])
    assert [t.dtype for t in sent] == [t.dtype for t in codec.pack([x, *others])]
    codec.allocate(2, [len(as_bytes(t)) for t in sent])
