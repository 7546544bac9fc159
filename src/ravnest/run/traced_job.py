"""A job that is ready to be trained: traced, with its configuration, its folder and the checkpoint it resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ravnest.config import TrainingConfig
from ravnest.graph import Program
from ravnest.pipeline.config import TrainerConfig
from ravnest.pipeline.optimizers import Optimizer
from ravnest.run.checkpoint.format import Checkpoint
from ravnest.run.checkpoint.resume import describe
from ravnest.run.checkpoint.start import StartWeights
from ravnest.run.checkpoint.writer import CheckpointConfig, RunCheckpoints
from ravnest.run.data import Weight

__all__ = ["TracedJob"]


@dataclass(frozen=True)
class TracedJob:
    """`batch_size` is that of the largest batch; `start` is the checkpoint to resume from."""

    program: Program
    optimizer: Optimizer
    config: TrainingConfig
    batch_size: int
    folder: Path
    start: Checkpoint | None = None
    weight: Weight | None = None

    @property
    def trainer(self) -> TrainerConfig:
        config = self.config
        return TrainerConfig(
            optimizer=self.optimizer, correction=config.correction, seed=config.seed, recompute=config.recomputes,
            memory=config.memory_mode, autocast=config.autocast, compression=config.activation_compression,
        )  # fmt: skip

    @cached_property
    def start_weights(self) -> StartWeights:
        """The tensors that it starts from."""
        return StartWeights(self.program, self.config.seed, self.start)

    def checkpoints(self) -> RunCheckpoints:
        """Return the checkpoints of its run, to be written while it trains."""
        config = self.config
        return RunCheckpoints(
            self.folder,
            CheckpointConfig(every=config.checkpoint_every, keep=config.keep_checkpoints, to=config.checkpoint_to),
            lambda plan: describe(self.program, self.optimizer, plan, config.seed),
            lambda: self.start_weights.write_frozen(self.folder),
        )
