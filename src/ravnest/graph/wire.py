"""A stage as it travels: versioned JSON, and what a node does before it believes a word of it.

`load` takes bytes from anyone. It decodes them against a strict schema, checks every name, reference, operation
and argument (`check`), and rehearses the stage on tensors without memory (`rehearse`), so that sizes are known
before memory is taken. What it returns can be run; everything else is a `ProgramError` that names the place.
"""

from __future__ import annotations

import msgspec

from ..core.errors import ProgramError
from .check import check_stage
from .limits import Limits
from .program import Stage
from .rehearse import rehearse

__all__ = ["dump", "load"]

_decoder = msgspec.json.Decoder(Stage, strict=True)


def dump(stage: Stage) -> bytes:
    """The stage's wire form."""
    return msgspec.json.encode(stage)


def load(data: bytes, limits: Limits | None = None) -> Stage:
    """The stage in `data`, checked and rehearsed; `ProgramError` if it is anything else than a good one."""
    limits = limits or Limits()
    if len(data) > limits.text_bytes:
        raise ProgramError(f"the stage file has {len(data)} bytes, at most {limits.text_bytes} are taken")
    try:
        stage = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProgramError(f"the stage file is not what a stage file looks like: {error}") from None
    except RecursionError:
        raise ProgramError("the stage file is nested too deeply") from None
    check_stage(stage, limits)
    rehearse(stage, limits)
    return stage
