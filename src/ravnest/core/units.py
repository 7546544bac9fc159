"""Parse and format sizes, rates and times: `"1.5 GB"`, `"20 Mbit/s"`, `"2.5 MB/s"`, `"12 ms"`, `"10m"`.

Bandwidth is quoted in bits per second and files in bytes; the code computes in bytes, bytes per second and seconds.
"""

from __future__ import annotations

import re

__all__ = [
    "UNLIMITED_BYTES",
    "format_bytes",
    "format_rate",
    "format_seconds",
    "format_throughput",
    "parse_bytes",
    "parse_rate",
    "parse_seconds",
]

UNLIMITED_BYTES = 1 << 46  # the memory of a local node without a limit

_BYTES = {
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
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(bits?/s|bps|B/s)\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|min|m|h|d)\s*")


def parse_bytes(text: str) -> int:
    """`"1.5GB"` -> 1500000000, `"512MiB"` -> 536870912."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 512MB or 1.5GiB")
    return int(float(match[1]) * _BYTES[(match[2] or "").lower()])


def parse_rate(text: str) -> float:
    """Bytes per second: `"20 Mbit/s"` -> 2500000.0, `"2.5 MB/s"` -> 2500000.0."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a rate: write a number and a unit, such as 20 Mbit/s or 2.5 MB/s")
    rate = float(match[1]) * _BYTES[match[2].lower()]
    return rate if match[3] == "B/s" else rate / 8


def parse_seconds(text: str) -> float:
    """`"12 ms"` -> 0.012, `"10m"` -> 600.0."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a time: write a number and one of us, ms, s, m (minutes), h or d, such as 12 ms"
        )
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(num_bytes: float) -> str:
    """1500000000 -> `"1.5 GB"`, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def format_rate(bytes_per_s: float) -> str:
    """2500000.0 -> `"20 Mbit/s"`, in powers of ten."""
    bits = bytes_per_s * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if abs(bits) < 999.5:
            return f"{_three_digits(bits)} {unit}"
        bits /= 1000
    return f"{_three_digits(bits)} Tbit/s"


def format_seconds(seconds: float) -> str:
    """0.012 -> `"12 ms"`, 600 -> `"10 m"`."""
    if abs(seconds) < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if abs(seconds) < 120:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds / 60)} m" if abs(seconds) < 7200 else f"{_three_digits(seconds / 3600)} h"


def format_throughput(samples_per_s: float) -> str:
    """6881.2 -> `"6,881 samples/s"`, 2.5 -> `"2.5 samples/s"`, 0.08 -> `"1 sample every 12.5 s"`."""
    if samples_per_s >= 9.95:
        return f"{samples_per_s:,.0f} samples/s"
    if samples_per_s >= 0.995:
        return f"{samples_per_s:.1f} samples/s"
    return f"1 sample every {format_seconds(1 / samples_per_s)}" if samples_per_s > 0 else "0 samples/s"


def _three_digits(number: float) -> str:
    """About three digits, without an exponent, which the parsers above do not accept: 0.0123, 1.23, 123, 1234."""
    if abs(number) >= 100:
        return f"{number:.0f}"
    return f"{number:.3g}" if abs(number) >= 1e-4 else "0"
