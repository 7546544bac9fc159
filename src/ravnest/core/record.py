"""Base classes of every message and file: frozen, unknown fields rejected, defaults omitted."""

from __future__ import annotations

import msgspec

__all__ = ["Record", "TaggedRecord"]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A strict record."""


class TaggedRecord(Record, frozen=True, tag=True):
    """A strict record tagged with its class name, for unions."""
