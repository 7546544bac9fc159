"""Rates and times as people write them: `"20 Mbit/s"`, `"2.5 MB/s"`, `"12 ms"`, `"10m"`. Sizes are in `config`.

Lines are sold in bits per second and files are counted in bytes; inside, all is bytes per second and seconds.
"""

from __future__ import annotations

import re

__all__ = ["format_rate", "format_seconds", "parse_rate", "parse_seconds"]

_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(bits?/s|bps|B/s)\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|min|m|h|d)\s*")


def parse_rate(text: str) -> float:
    """Bytes per second: `"20 Mbit/s"` -> 2500000.0, `"2.5 MB/s"` -> 2500000.0."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a rate: write a number and a unit, such as 20 Mbit/s or 2.5 MB/s")
    rate = float(match[1]) * _POWERS[match[2].lower()]
    return rate if match[3] == "B/s" else rate / 8


def parse_seconds(text: str) -> float:
    """`"12 ms"` -> 0.012, `"10m"` -> 600.0."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a time: write a number and one of us, ms, s, m (minutes), h or d, such as 12 ms"
        )
    return float(match[1]) * _SECONDS[match[2]]


def format_rate(bytes_per_s: float) -> str:
    """2500000.0 -> `"20 Mbit/s"`, in powers of ten."""
    bits = bytes_per_s * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if abs(bits) < 999.5:
            return f"{_three(bits)} {unit}"
        bits /= 1000
    return f"{_three(bits)} Tbit/s"


def format_seconds(seconds: float) -> str:
    """0.012 -> `"12 ms"`, 600 -> `"10 m"`."""
    if abs(seconds) < 0.9995:
        return f"{_three(seconds * 1e3)} ms"
    if abs(seconds) < 120:
        return f"{_three(seconds)} s"
    return f"{_three(seconds / 60)} m" if abs(seconds) < 7200 else f"{_three(seconds / 3600)} h"


def _three(number: float) -> str:
    """About three digits, without an exponent, which the readers above do not take: 0.0123, 1.23, 123, 1234."""
    if abs(number) >= 100:
        return f"{number:.0f}"
    return f"{number:.3g}" if abs(number) >= 1e-4 else "0"
