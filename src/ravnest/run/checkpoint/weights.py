"""A model's weights between the requester's files and the stages: split at the start, put together at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ravnest.graph import Program, Stage, stage_weights, write_weights
from ravnest.graph.program import StateSpec
from ravnest.graph.weights import iterate_weights, replay

__all__ = ["gather", "unused_tensors", "write_first_weights"]


def write_first_weights(program: Program, stage: Stage, path: Path) -> bool:
    """A model that exists gives each stage its tensors in a file; a builder's stages make their own (False)."""
    if program.init_log is not None:
        return False
    tensors = stage_weights(program, stage)
    with write_weights(path, [s for s in stage.state if s.target in tensors]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return True


def gather(
    program: Program, stages: Sequence[Stage], parts: Sequence[Path], path: Path, seed: int, *, step: int = 0
) -> None:
    """One file with the model's names out of the stages' files, a tensor at a time. What no stage uses is kept."""
    contents = {s.target: s for s in (*program.state, *program.idle) if s.persistent}
    metadata = {"ties": json.dumps(dict(program.ties)), "step": str(step)}
    with write_weights(path, contents.values(), metadata) as writer:
        for name, tensor in unused_tensors(program, seed).items():
            writer.write(name, tensor)
        for stage, part in zip(stages, parts, strict=True):
            for name, tensor in iterate_weights(stage, part):
                if name in writer.missing:
                    writer.write(name, tensor)


def unused_tensors(program: Program, seed: int) -> dict[str, Tensor]:
    """What the model has and no stage uses."""
    idle: list[StateSpec] = [s for s in program.idle if s.persistent]
    tensors = {s.target: program.tensors[s.target] for s in idle}
    if program.init_log is None or not idle:
        return {name: tensor.detach() for name, tensor in tensors.items()}
    return replay(program.init_log.init_for(tensors), set(tensors), seed)
