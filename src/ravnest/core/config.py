"""How a configuration is written: a frozen, keyword-only dataclass next to its owner, checked when made.

`config` is the decorator; `require` is how a field is checked; sizes read and print as people write them.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TypeVar, dataclass_transform

__all__ = ["config", "format_bytes", "parse_bytes", "require"]

T = TypeVar("T")

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[T]) -> type[T]:
    """Make `cls` a configuration: immutable, fields given by name only."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def require(condition: bool, message: str) -> None:
    """Refuse a configuration; `message` says what would be right."""
    if not condition:
        raise ValueError(message)


def parse_bytes(text: str) -> int:
    """`"1.5GB"` -> 1500000000, `"512MiB"` -> 536870912."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 512MB or 1.5GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def format_bytes(num_bytes: float) -> str:
    """1500000000 -> `"1.5 GB"`, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
