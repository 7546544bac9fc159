"""Stage files: versioned JSON, validated before use.

`load` accepts bytes from untrusted senders. It decodes them against a strict schema, checks every name, reference,
operation and argument (`validate`), and runs the stage on meta tensors (`dry_run`), so that sizes are known before
memory is allocated. The returned stage is safe to run; any problem is a `ProgramError` that names its location.
"""

from __future__ import annotations

import msgspec

from ravnest.errors import ProgramError
from ravnest.graph.dry_run import dry_run
from ravnest.graph.limits import StageLimits
from ravnest.graph.program import Stage
from ravnest.graph.validate import check_stage

__all__ = ["dump", "load"]

_decoder = msgspec.json.Decoder(Stage, strict=True)


def dump(stage: Stage) -> bytes:
    """Encode a stage as JSON."""
    return msgspec.json.encode(stage)


def load(data: bytes, limits: StageLimits | None = None) -> Stage:
    """Decode and validate a stage.

    Raises:
        ProgramError: if the stage is malformed, not allowed or exceeds `limits`.
    """
    limits = limits or StageLimits()
    if len(data) > limits.text_bytes:
        raise ProgramError(f"the stage file has {len(data)} bytes, at most {limits.text_bytes} are allowed")
    try:
        stage = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProgramError(f"the stage file is malformed: {error}") from None
    except RecursionError:
        raise ProgramError("the stage file is nested too deeply") from None
    check_stage(stage, limits)
    dry_run(stage, limits)
    return stage
