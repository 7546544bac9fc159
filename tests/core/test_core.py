"""Ids, sizes, clocks and configurations."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.core import errors
from ravnest.core.clock import Clock, ManualClock, SystemClock
from ravnest.core.config import config, format_bytes, parse_bytes, require
from ravnest.core.ids import check_id, new_id


@given(st.integers())
def test_the_same_seed_names_things_the_same(seed: int) -> None:
    first, second = (new_id("node", random.Random(seed)) for _ in range(2))
    assert first == second == check_id(first)


@pytest.mark.parametrize("name", ["", "-a", "A", "a b", "a/b", "..", "a" * 64, "é"])
def test_bad_names(name: str) -> None:
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
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@given(st.integers(0, 10**15))
def test_printed_sizes_read_back(number: int) -> None:
    assert abs(parse_bytes(format_bytes(number)) - number) <= 0.06 * max(number, 1)


def test_clocks() -> None:
    clock = ManualClock(5)
    clock.advance(2.5)
    assert clock.now_s() == 7.5
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)
    system: Clock = SystemClock()
    assert system.now_s() <= system.now_s()


def test_a_configuration_is_checked_and_frozen() -> None:
    @config
    class Sample:
        size: int = 1

        def __post_init__(self) -> None:
            require(self.size > 0, f"size must be positive, not {self.size}")

    assert Sample(size=3).size == 3
    with pytest.raises(ValueError, match="positive, not 0"):
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
