"""Samples of parametrised tests: some run in `make test`, the others in `make test-soak`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["every", "only"]


def every(number: int, values: Iterable[Any], *, first: int = 0) -> list[Any]:
    """Mark all values but each `number`-th, from `first` on, as soak tests."""
    return [value if i % number == first else _soak(value) for i, value in enumerate(values)]


def only(chosen: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Mark all values that are not among the chosen ones as soak tests."""
    kept = set(chosen)
    return [value if value in kept else _soak(value) for value in values]


def _soak(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.soak)
