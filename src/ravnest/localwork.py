"""All that a run on this machine needs to know, and what each of its workers is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoints import Checkpoint, Manifest
from .core.schedule import Rule
from .graph import Program, Stage
from .keeping import CheckpointWishes
from .modelfile import write_first_weights
from .node.orders import Assign
from .runtime.roles import roles
from .runtime.settings import Settings

__all__ = ["Work", "assigns"]


@dataclass(frozen=True)
class Work:
    """The model in stages, who has which, how they train, and where it is kept."""

    program: Program
    stages: Sequence[Stage]
    names: Sequence[str]
    rules: Sequence[Rule]
    settings: Settings
    threads: int
    max_batch: int
    folder: Path
    about: Manifest  # what checkpoints are of
    cores: Sequence[int] | None = None
    patience_s: float = 600.0
    checkpoints: CheckpointWishes = field(default_factory=CheckpointWishes)
    start: Checkpoint | None = None  # to go on from

    @property
    def first(self) -> int:
        """How many steps there have been."""
        return 0 if self.start is None else self.start.step


def assigns(work: Work) -> list[Assign]:
    """What makes each worker its stage."""
    given = roles(work.stages, [r.delay for r in work.rules])
    return [
        Assign(
            settings=work.settings, rule=rule, role=role, max_batch=work.max_batch, threads=work.threads,
            core=work.cores[stage.index] if work.cores else -1, weights=_first_weights(work, stage),
            begin=work.first, state=() if work.start is None else tuple(map(str, work.start.paths)),
        )
        for stage, rule, role in zip(work.stages, work.rules, given, strict=True)
    ]  # fmt: skip


def _first_weights(work: Work, stage: Stage) -> str:
    """A checkpoint has all of them."""
    path = work.folder / f".first-{stage.index}.safetensors"
    return str(path) if work.start is None and write_first_weights(work.program, stage, path) else ""
