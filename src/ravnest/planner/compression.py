"""Chooses the compression of averages if the user does not: as exact as the lines allow.

    seconds(codec) = bytes of the busiest line * ratio(codec) / its rate       ratio = 1 (fp32), 1/2 (bf16), 1/4 (int8)

Training continues while clusters average, but an average that takes long is of old weights, and its bytes share the
lines with those of the pipeline. So the most exact codec is chosen with which a round takes at most half of the time
from one round to the next. Before the first round its bytes are unknown, and the line's rate alone decides. Processor
time does not matter: one core encodes and decodes 2.3 GB/s of float32 as int8, and has fewer bytes to encrypt then.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

from ravnest.core.config import require
from ravnest.core.units import format_bytes

__all__ = ["CodecChoice", "LineLoad", "choose_codec"]

RATIOS = {"fp32": 1.0, "bf16": 0.5, "int8": 0.254}  # to the bytes of float32, the most exact first
MAX_BUSY = 0.5  # of the time between two rounds
FAST_BYTES_PER_S, SLOW_BYTES_PER_S = 100e6, 12.5e6  # a gigabit a second with room to spare; a home line


class LineLoad(NamedTuple):
    """The upload rate of a node, and the bytes it sends in a round as float32, if known."""

    bytes_per_s: float
    num_bytes: float | None = None


class CodecChoice(NamedTuple):
    codec: str
    reason: str


def choose_codec(lines: Iterable[LineLoad], between_s: float | None = None) -> CodecChoice:
    """The codec of the next round, for nodes with these lines; `between_s` is from one round to the next."""
    lines = list(lines)
    require(all(line.bytes_per_s > 0 for line in lines), "bytes_per_s must be > 0")
    require(between_s is None or between_s > 0, f"between_s must be > 0, got {between_s}")
    if not lines:
        return CodecChoice("fp32", "no nodes average")
    loads_s = [line.num_bytes / line.bytes_per_s for line in lines if line.num_bytes is not None]
    if between_s is None or not isfinite(between_s) or len(loads_s) < len(lines):
        return _by_rate(min(line.bytes_per_s for line in lines))
    return _by_time(max(loads_s), between_s)


def _by_rate(slowest: float) -> CodecChoice:
    rate = f"the slowest line carries {format_bytes(slowest)}/s, and no round has been measured yet"
    if slowest >= FAST_BYTES_PER_S:
        return CodecChoice("fp32", rate)
    return CodecChoice("bf16" if slowest > SLOW_BYTES_PER_S else "int8", rate)


def _by_time(line_s: float, between_s: float) -> CodecChoice:
    """The most exact that is done in time, else the smallest."""
    allowed_s = MAX_BUSY * between_s
    for codec, ratio in RATIOS.items():
        if line_s * ratio <= allowed_s:
            return CodecChoice(codec, f"a round takes {line_s * ratio:.2g} s of the {between_s:.3g} s to the next")
    codec, ratio = list(RATIOS.items())[-1]
    return CodecChoice(codec, f"a round still takes {line_s * ratio:.2g} s of the {between_s:.3g} s to the next")
