"""Base types of plain data: configurations of a process (`config`), and records in messages and files (`Record`).

A configuration is a frozen, keyword-only dataclass next to its owner; it checks its fields with `require` in
`__post_init__`. A record is a frozen msgspec struct; unknown fields are rejected, and fields with their default value
are not written.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar, dataclass_transform

import msgspec

__all__ = ["config", "require", "Record", "TaggedRecord"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only dataclass."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds; the message names the valid values."""
    if not condition:
        raise ValueError(message)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A strict record."""


class TaggedRecord(Record, frozen=True, tag=True):
    """A strict record tagged with its class name, for unions."""
