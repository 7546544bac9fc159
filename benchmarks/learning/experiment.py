"""Experiments as plain data: the model, how it is trained, how many copies there are and how they average.

An experiment without its default values, as JSON, is the key of its results: fields that are added later do not
invalidate results measured before.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ravnest.averaging.codec import CODECS
from ravnest.core.config import Record, require
from ravnest.pipeline import optimizers, staleness
from ravnest.pipeline.optimizers import LRSchedule, Optimizer
from ravnest.pipeline.staleness import Correction

__all__ = ["Averaging", "Experiment", "changes", "key_of", "optimizer_of"]

MOMENTS = ("none", "first", "all")


class Averaging(Record, frozen=True, kw_only=True):
    """How copies average.

    Args:
        interval: Updates of each copy between two averagings.
        final_interval: The interval at the end of training, if it changes; it does so in proportion to the data seen.
        lag: Updates between a snapshot and the update that applies its average.
        outer_lr: Learning rate of the outer step; 1 without momentum is the plain average.
        outer_momentum: Its Nesterov momentum.
        codec: Encoding of averages.
        of_movements: Whether the movements since the last average are averaged instead of the weights; for codecs that
            keep few bits. The first are those from the initial weights.
        moments: Which optimizer state is averaged with the weights: none, first (the momentum), or all.
        fragments: Parts of the model that are averaged in turn, each once per interval.
    """

    interval: int = 4
    final_interval: int = 0
    lag: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    codec: str = "fp32"
    of_movements: bool = False
    moments: str = "none"
    fragments: int = 1

    def __post_init__(self) -> None:
        require(self.interval >= 1, f"interval must be >= 1 update, got {self.interval}")
        require(self.final_interval >= 0, f"final_interval must be >= 0, got {self.final_interval}")
        require(self.lag >= 1, f"lag must be >= 1 update, got {self.lag}")
        require(self.outer_lr > 0, f"outer_lr must be > 0, got {self.outer_lr}")
        require(0 <= self.outer_momentum < 1, f"outer_momentum must be >= 0 and < 1, got {self.outer_momentum}")
        require(self.codec in CODECS, f"codec must be one of {', '.join(CODECS)}, got {self.codec!r}")
        require(self.moments in MOMENTS, f"moments must be one of {', '.join(MOMENTS)}, got {self.moments!r}")
        require(
            1 <= self.fragments <= self.interval,
            f"fragments must be from 1 to the interval ({self.interval}), got {self.fragments}",
        )

    @property
    def has_outer_step(self) -> bool:
        return (self.outer_lr, self.outer_momentum) != (1.0, 0.0)

    def interval_at(self, progress: float) -> int:
        """The interval after this share of the training."""
        if not self.final_interval:
            return self.interval
        return round(self.interval + (self.final_interval - self.interval) * progress)


class Experiment(Record, frozen=True, kw_only=True):
    """One training.

    Args:
        task: Name of the model and its data (`benchmarks.learning.tasks`).
        optimizer: Name of the optimizer, with the settings of `optimizer_of`.
        lr: Learning rate.
        batch: Samples in one update of a copy.
        updates: Updates of each copy.
        delays: Updates by which gradients are late, for each stage; the number of stages follows.
        correction: Correction of late gradients.
        memory: Memory mode of the trainers; without a delay, compact is exact.
        schedule: cosine (a warm-up over a tenth of the updates, then down to a tenth of the rate) or constant.
        copies: Copies of the model, each with samples of its own.
        cuts: Stages start before these shares of the operations, a tuple for each copy; by default in equal parts.
        averaging: How copies average.
    """

    task: str = "small"
    optimizer: str = "AdamW"
    lr: float = 0.0
    batch: int = 8
    updates: int = 600
    delays: tuple[int, ...] = (0,)
    correction: Correction = staleness.none()
    memory: str = "compact"
    schedule: str = "cosine"
    copies: int = 1
    cuts: tuple[tuple[float, ...], ...] = ()
    averaging: Averaging = Averaging()

    def __post_init__(self) -> None:
        require(self.lr >= 0, f"lr must be >= 0, got {self.lr}")
        require(self.batch >= 1, f"batch must be >= 1 sample, got {self.batch}")
        require(self.updates >= 1, f"updates must be >= 1, got {self.updates}")
        require(self.copies >= 1, f"copies must be >= 1, got {self.copies}")
        require(len(self.delays) >= 1, "delays must have a number for each stage")
        require(len(self.cuts) in (0, self.copies), f"cuts must have {self.copies} tuples, got {len(self.cuts)}")

    def cuts_of(self, copy: int) -> tuple[float, ...]:
        """The places where a copy is cut, as shares of the operations."""
        count = len(self.delays)
        return self.cuts[copy] if self.cuts else tuple(i / count for i in range(1, count))


def key_of(experiment: Experiment) -> str:
    return json.dumps(changes(experiment))


def changes(experiment: msgspec.Struct) -> dict[str, Any]:
    """The fields that differ from their default values, as plain data."""
    result: dict[str, Any] = {}
    for item in msgspec.structs.fields(experiment):
        value = getattr(experiment, item.name)
        if value != item.default:
            result[item.name] = changes(value) if isinstance(value, msgspec.Struct) else msgspec.to_builtins(value)
    return result


def optimizer_of(experiment: Experiment) -> Optimizer:
    """The optimizer with the settings that all experiments share: gradients are clipped at a norm of 1."""
    lr, updates = experiment.lr, experiment.updates
    if experiment.schedule == "constant":
        schedule = LRSchedule()
    else:
        schedule = optimizers.cosine(updates, warmup_steps=updates // 10, final_ratio=0.1)
    match experiment.optimizer:
        case "SGD":
            return optimizers.SGD(lr, schedule=schedule)
        case "AdamW":
            return optimizers.AdamW(lr, schedule=schedule, clip_norm=1.0)
        case "NAdam 0.99":
            return optimizers.NAdam(lr, betas=(0.99, 0.999), weight_decay=0.01, schedule=schedule, clip_norm=1.0)
        case "Muon":
            return optimizers.Muon(lr, weight_decay=0.01, schedule=schedule, clip_norm=1.0)
        case "SOAP":
            return optimizers.SOAP(lr, schedule=schedule, clip_norm=1.0)
        case "LAMB":
            return optimizers.LAMB(lr, schedule=schedule, clip_norm=1.0)
    raise ValueError(f"optimizer must be SGD, AdamW, NAdam 0.99, Muon, SOAP or LAMB, got {experiment.optimizer!r}")
