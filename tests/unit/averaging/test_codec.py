"""Codecs: sizes on the wire, errors, and numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.averaging.codec import CODECS, Bytes, Codec, Floats, ScratchBuffers, find_codec, is_finite
from tests.unit.averaging.error_bound import IN_BLOCKS, error_bound

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)
VECTORS = st.lists(NUMBERS, min_size=1, max_size=700).map(lambda values: np.array(values, np.float32))
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)


def encode(codec: Codec, values: Floats, residual: Floats) -> Bytes:
    wire = np.empty(codec.wire_bytes(values.size) + 3, np.uint8)[: codec.wire_bytes(values.size)]
    codec.encode(values, residual, wire, ScratchBuffers())
    return wire


def decode(codec: Codec, wire: Bytes, size: int) -> Floats:
    values = np.full(size, np.nan, np.float32)
    codec.decode(wire, values)
    return values


@each_codec
@given(values=VECTORS)
@settings(deadline=None)
def test_the_error_is_within_the_bound_and_is_kept_as_residual(codec: Codec, values: Floats) -> None:
    residual = np.zeros_like(values)
    decoded = decode(codec, encode(codec, values, residual), values.size)
    magnitudes = np.full(values.size, np.abs(values).max()) if codec.name in IN_BLOCKS else np.abs(values)
    bounds = np.array([error_bound(codec.name, 1, float(m)) for m in magnitudes]) + 1e-6 * magnitudes + 1e-38
    assert np.all(np.abs(decoded.astype(np.float64) - values) <= bounds)
    np.testing.assert_allclose(residual, values - decoded, rtol=1e-6, atol=1e-30)


@each_codec
@given(values=VECTORS)
@settings(deadline=None)
def test_a_residual_is_sent_with_the_next_values(codec: Codec, values: Floats) -> None:
    residual = values.copy()
    decoded = decode(codec, encode(codec, np.zeros_like(values), residual), values.size)
    np.testing.assert_array_equal(decoded, decode(codec, encode(codec, values, np.zeros_like(values)), values.size))


def test_bf16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    wire = encode(find_codec("bf16"), values, np.zeros_like(values))
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(wire.view(np.int16), expected)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [("fp32", 1000, 4000), ("bf16", 1000, 2000), ("int8", 1000, 1016), ("int4", 1000, 576), ("top16", 1000, 192)],
)
def test_bytes_on_the_wire(name: str, size: int, expected: int) -> None:
    assert find_codec(name).wire_bytes(size) == expected


@each_codec
@given(size=st.integers(0, 3000))
def test_a_chunk_fits_into_the_memory_of_its_elements(codec: Codec, size: int) -> None:
    assert codec.wire_bytes(size) <= 4 * size


@each_codec
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [3, 600])
def test_numbers_that_are_not_finite_on_the_wire_are_detected(codec: Codec, value: float, size: int) -> None:
    wire = encode(codec, np.ones(size, np.float32), np.zeros(size, np.float32))
    assert codec.is_finite(wire, size)
    if codec.name == "bf16":
        wire.view(np.uint16)[-1] = np.float32(value).view(np.uint32) >> 16
    else:
        wire[:4].view(np.float32)[0] = value
    assert not codec.is_finite(wire, size)


def test_top16_sends_what_it_left_out_in_later_rounds() -> None:
    values, residual = np.linspace(-1.0, 2.0, 512, dtype=np.float32), np.zeros(512, np.float32)
    codec, sent = find_codec("top16"), np.zeros(512, np.float32)
    first = decode(codec, encode(codec, values, residual), 512)
    assert np.count_nonzero(first) == 32
    assert set(np.flatnonzero(first)) == {*range(16), *range(496, 512)}, "the largest magnitudes of each block"
    for _ in range(400):
        sent += decode(codec, encode(codec, values, residual), 512)
    np.testing.assert_allclose(sent / 400, values, atol=0.1)


def test_large_numbers_whose_sum_is_not_finite_are_finite() -> None:
    assert is_finite(np.full(100, 3e38, np.float32))
    assert not is_finite(np.array([1.0, np.inf, -np.inf], np.float32))


def test_an_unknown_codec_is_rejected_with_a_list_of_codecs() -> None:
    with pytest.raises(ValueError, match="one of fp32, bf16, int8"):
        find_codec("fp8")
