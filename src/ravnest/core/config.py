"""Decorator and field check for configurations: frozen, keyword-only dataclasses, defined next to their owner.

A configuration checks its fields with `require` in `__post_init__`.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

__all__ = ["config", "require"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds; the message names the valid values."""
    if not condition:
        raise ValueError(message)
