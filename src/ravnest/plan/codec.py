"""In which form averages travel, if the user does not say: as exact as the lines allow.

    seconds(codec) = bytes of the busiest line * part(codec) / its rate        part = 1 (fp32), 1/2 (bf16), 1/4 (int8)

Training goes on while clusters average, but an average that takes long is of old weights, and its bytes stand in line
with those of the pipeline. So the most exact form is taken in which a round is over in half of the time from one to the
next. Before the first round nobody knows what it carries: then the rate alone tells. Processors need not be asked: one
core encodes and decodes 2.3 GB/s of float32 as int8, and has fewer bytes to encrypt then.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple

from ..core.config import format_bytes, require

__all__ = ["CodecChoice", "LineLoad", "choose_codec"]

PARTS = {"fp32": 1.0, "bf16": 0.5, "int8": 0.254}  # of the bytes of float32, the most exact first
BUSY = 0.5  # of the time between two rounds
FAST_BYTES_PER_S, SLOW_BYTES_PER_S = 100e6, 12.5e6  # a gigabit a second with room to spare; a home line


class LineLoad(NamedTuple):
    """What a node sends in a round as float32, if that is known, and how fast it can."""

    bytes_per_s: float
    num_bytes: float | None = None


class CodecChoice(NamedTuple):
    codec: str
    reason: str


def choose_codec(lines: Iterable[LineLoad], between_s: float | None = None) -> CodecChoice:
    """The form for the next round, of nodes with these lines; `between_s` is from one round to the next."""
    lines = list(lines)
    require(all(line.bytes_per_s > 0 for line in lines), "a line carries more than 0 bytes a second")
    require(between_s is None or between_s > 0, f"the time between rounds is more than 0 s, not {between_s}")
    if not lines:
        return CodecChoice("fp32", "nobody averages")
    loads_s = [line.num_bytes / line.bytes_per_s for line in lines if line.num_bytes is not None]
    if between_s is None or not isfinite(between_s) or len(loads_s) < len(lines):
        return _by_rate(min(line.bytes_per_s for line in lines))
    return _by_time(max(loads_s), between_s)


def _by_rate(slowest: float) -> CodecChoice:
    rate = f"the slowest line carries {format_bytes(slowest)}/s, and no round has told yet what it takes"
    if slowest >= FAST_BYTES_PER_S:
        return CodecChoice("fp32", rate)
    return CodecChoice("bf16" if slowest > SLOW_BYTES_PER_S else "int8", rate)


def _by_time(line_s: float, between_s: float) -> CodecChoice:
    """The most exact that is over in time; if none is, the shortest."""
    allowed_s = BUSY * between_s
    for codec, part in PARTS.items():
        if line_s * part <= allowed_s:
            return CodecChoice(codec, f"a round takes {line_s * part:.2g} s of the {between_s:.3g} s to the next")
    codec, part = list(PARTS.items())[-1]
    return CodecChoice(codec, f"even so a round takes {line_s * part:.2g} s of the {between_s:.3g} s to the next")
