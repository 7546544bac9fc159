"""Names, sizes, clocks, configurations and the error tree."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest import errors
from ravnest.core.clock import Clock, SystemClock
from ravnest.core.config import config, require
from ravnest.core.ids import check_id
from ravnest.core.units import format_bytes, format_throughput, parse_bytes


@pytest.mark.parametrize("name", ["", "-a", "A", "a b", "a/b", "..", "a" * 64, "é"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid name"):
        check_id(name)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("512", 512),
        ("1kB", 1000),
        ("1.5GB", 1_500_000_000),
        ("512MiB", 2**29),
        (" 2 gib ", 2**31),
        ("1T", 10**12),
    ],
)
def test_sizes(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1,5GB", "1XB", "1e9", "nan"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@given(st.integers(0, 10**15))
def test_formatted_sizes_parse_back(number: int) -> None:
    assert abs(parse_bytes(format_bytes(number)) - number) <= 0.06 * max(number, 1)


@pytest.mark.parametrize(
    ("samples_per_s", "text"),
    [
        (6881.2, "6,881 samples/s"), (9.96, "10 samples/s"), (2.46, "2.5 samples/s"), (0.999, "1.0 samples/s"),
        (0.4, "1 sample every 2.5 s"), (0.08, "1 sample every 12.5 s"), (1 / 600, "1 sample every 10 m"),
        (0.0, "0 samples/s"),
    ],
)  # fmt: skip
def test_throughput_has_a_unit_that_fits(samples_per_s: float, text: str) -> None:
    assert format_throughput(samples_per_s) == text


def test_the_system_clock_is_monotonic() -> None:
    system: Clock = SystemClock()
    assert system.now_s() <= system.now_s()


def test_a_configuration_is_checked_and_frozen() -> None:
    @config
    class Sample:
        size: int = 1

        def __post_init__(self) -> None:
            require(self.size > 0, f"size must be > 0, got {self.size}")

    assert Sample(size=3).size == 3
    with pytest.raises(ValueError, match="> 0, got 0"):
        Sample(size=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sample().size = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Sample(3)  # type: ignore[call-arg]


def test_the_drawn_tree_of_errors_is_the_real_one() -> None:
    drawn = errors.__doc__ or ""
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.RavnestError)
        assert name in drawn
