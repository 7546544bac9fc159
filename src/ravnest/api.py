"""What a user writes: a job is a model, a loss, an optimizer and data; training it gives a run.

job = ravnest.Job(model=lambda: GPT(config), loss=loss_fn, optimizer=ravnest.AdamW(3e-4), data=loader)
run = job.train(steps=1000, on="local:4")
run.state_dict()
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from .core.config import config, parse_bytes, require
from .core.metrics import StageMetrics
from .data import Batches
from .graph import trace
from .graph.batch import batch_size_of, flatten, split_batch
from .local import LocalRun, Progress, Work
from .localplan import LocalPlan, Wishes, plan_local
from .localrate import Cores
from .profile.mix import Workload
from .runtime import corrections
from .runtime.corrections import Correction
from .runtime.optimizers import AdamW, Optimizer
from .runtime.settings import Settings

__all__ = ["Job", "Run", "Training"]

_ON = re.compile(r"local:([1-9][0-9]*)")


@config
class Training:
    """How to train. Every field has a sensible default; None leaves it to the planner, and `steps` to the data's end.

    One batch of the data is one step (update). It is split into `accumulate` microbatches, or into ones of
    `microbatch` samples. `mode` is "async" (no bubbles, gradients one update late) or "sync" (flush each step: bit
    for bit what plain PyTorch does). `memory` is what each node may use, such as "1GB,2GB"; `cores` are the processor
    cores the nodes compute on, such as "0,1,1": nodes that share one are planned to be slower. `speeds` says how fast
    each node is by other causes (a quota, say), such as "1,0.5,0.5" of what is measured here.
    """

    steps: int | None = None
    epochs: int | None = None
    on: str = "local:2"
    mode: str = "async"
    accumulate: int | None = None
    microbatch: int | None = None
    max_staleness: int | None = None
    correction: Correction = corrections.DEFAULT
    memory: str | None = None
    threads: int | None = None
    cores: str | None = None
    speeds: str | None = None
    recompute: bool = False
    autocast: str = "none"
    compression: str = "none"
    validate_every: int = 0
    validation_batches: int = 32
    seed: int = 0
    folder: Path | str | None = None

    def __post_init__(self) -> None:
        require(self.mode in ("async", "sync"), f"mode is async or sync, not {self.mode!r}")
        require(_ON.fullmatch(self.on) is not None, f"on is local:N with N nodes on this machine, not {self.on!r}")
        require(self.autocast in ("none", "bf16"), f"autocast is none or bf16, not {self.autocast!r}")
        compressions = ("none", "bf16", "int8")
        require(self.compression in compressions, f"compression is none, bf16 or int8, not {self.compression!r}")
        require(self.steps is None or self.steps >= 1, f"steps must be at least 1, not {self.steps}")
        require(self.epochs is None or self.epochs >= 1, f"epochs must be at least 1, not {self.epochs}")
        require(self.threads is None or self.threads >= 1, f"threads must be at least 1, not {self.threads}")
        require(
            self.max_staleness is None or self.max_staleness >= 0,
            f"max_staleness is a number of updates, 0 or more, not {self.max_staleness}",
        )

    @property
    def num_nodes(self) -> int:
        match = _ON.fullmatch(self.on)
        assert match is not None
        return int(match[1])

    @property
    def num_threads(self) -> int:
        """Torch threads of each worker: the cores shared out, one at the least."""
        return self.threads or (1 if self.cores else max(1, _num_cores() // self.num_nodes))

    @property
    def core_of(self) -> tuple[int, ...] | None:
        """The core of each node."""
        if self.cores is None:
            return None
        try:
            chosen = tuple(int(text) for text in self.cores.split(","))
        except ValueError:
            raise ValueError(f"cores are numbers such as 0,1,1, not {self.cores!r}") from None
        require(len(chosen) == self.num_nodes, f"{self.num_nodes} nodes need as many cores, not {len(chosen)}")
        there = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        require(set(chosen) <= there, f"cores {sorted(set(chosen) - there)} are not there; these are: {sorted(there)}")
        return chosen

    @property
    def speed_of(self) -> tuple[float, ...] | None:
        """How fast each node is next to a core of this machine."""
        if self.speeds is None:
            return None
        try:
            chosen = tuple(float(text) for text in self.speeds.split(","))
        except ValueError:
            raise ValueError(f"speeds are numbers such as 1,0.5,0.5, not {self.speeds!r}") from None
        require(len(chosen) == self.num_nodes, f"{self.num_nodes} nodes need as many speeds, not {len(chosen)}")
        require(all(0.001 <= s <= 1000 for s in chosen), f"speeds are from 0.001 to 1000, not {self.speeds!r}")
        return chosen

    @property
    def memory_bytes(self) -> tuple[int, ...] | None:
        """One size for all nodes, or one for each."""
        if self.memory is None:
            return None
        sizes = tuple(parse_bytes(text) for text in self.memory.split(","))
        return sizes * self.num_nodes if len(sizes) == 1 else sizes


@dataclass
class Job:
    """What to train. `model` is a module, or a function that builds one (then nobody ever holds it whole).

    `data` is an iterable of batches `(inputs, targets)`; `validation` is too. With `loss=None` a batch is the inputs
    alone and the model returns the loss.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[..., Any] | None
    data: Iterable[Any]
    optimizer: Optimizer = field(default_factory=AdamW)
    validation: Iterable[Any] | None = None
    name: str = "run"
    training: Training = field(default_factory=Training)

    def train(
        self, training: Training | None = None, *, show: Callable[[LocalPlan], Show] | None = None, **changes: Any
    ) -> Run:
        """Train on this machine and wait for the end. `changes` are fields of `Training`."""
        how = Training(**{**vars(training or self.training), **changes})
        batches = Batches(self.data)
        program = trace(self.model, self.loss, batches.first)
        plan = plan_local(program, self.optimizer, how.correction, self._wishes(how, batches.first))
        folder = _new_folder(how.folder, self.name)
        plan.write(folder / "plan.json")
        settings = Settings(
            optimizer=self.optimizer, correction=how.correction, seed=how.seed, recompute=how.recompute,
            autocast=how.autocast, compression=how.compression,
        )  # fmt: skip
        work = Work(
            program=program, stages=plan.stages, names=[p.node for p in plan.plans], rules=plan.rules,
            settings=settings, threads=how.num_threads, max_batch=plan.max_microbatch, folder=folder,
            cores=how.core_of,
        )  # fmt: skip
        shown = (show or _Silent)(plan)
        run = LocalRun(work, shown.update)
        validate = self._validate(how) if self.validation is not None else None
        try:
            run.run(_limited(batches, how.epochs), how.steps, validate, how.validate_every)
        finally:
            shown.close()
        return Run(folder, plan, run.losses, run.evaluations, dict(run.progress.stages), run.progress.samples_per_s)

    def workload(self) -> Workload:
        """Its program, at the size of a microbatch: what a machine's speed can be measured on."""
        example, how = Batches(self.data).first, self.training
        size = self._batch_size(example)
        parts = how.accumulate or how.num_nodes + 1
        return Workload(trace(self.model, self.loss, example), min(size, how.microbatch or -(-size // parts)))

    def _batch_size(self, example: Any) -> int:
        return batch_size_of(flatten(split_batch(example, self.loss is not None), "batch")[1])

    def _wishes(self, how: Training, example: Any) -> Wishes:
        return Wishes(
            nodes=how.num_nodes, batch_size=self._batch_size(example), accumulate=how.accumulate,
            microbatch=how.microbatch, synchronous=how.mode == "sync", max_staleness=how.max_staleness,
            memory_bytes=how.memory_bytes, recompute=how.recompute, speeds=how.speed_of,
            cores=Cores(count=_num_cores(), threads=how.num_threads, pinned=how.core_of),
        )  # fmt: skip

    def _validate(self, how: Training) -> Callable[[], Sequence[Any]]:
        assert self.validation is not None
        held_out = self.validation
        return lambda: list(islice(held_out, how.validation_batches))


class Show:
    """Follows a run for a person. This one shows nothing."""

    def update(self, progress: Progress) -> None: ...

    def close(self) -> None: ...


class _Silent(Show):
    def __init__(self, plan: LocalPlan) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """What a training left: its folder, its plan, its losses step by step, and each stage's last account."""

    folder: Path
    plan: LocalPlan
    losses: list[float]
    evaluations: list[dict[str, float]]
    stages: dict[int, StageMetrics]
    samples_per_s: float

    def state_dict(self) -> dict[str, Tensor]:
        """The trained weights under the model's own names, tied ones included."""
        return read_model(self.folder / "model.safetensors")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_model(path: Path | str) -> dict[str, Tensor]:
    """The weights in a `model.safetensors` of a run."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        ties = json.loads((file.metadata() or {}).get("ties", "{}"))
    tensors: dict[str, Tensor] = load_file(path)
    return {**tensors, **{name: tensors[kept] for name, kept in ties.items()}}


def _new_folder(folder: Path | str | None, name: str) -> Path:
    """The run's folder: the one asked for, or a new one under `runs/`."""
    if folder is not None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if (path / "model.safetensors").exists():
            raise ValueError(f"{path} holds a finished run already: choose another folder or remove it")
        return path.resolve()
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1000):
        path = base if not attempt else base.with_name(f"{base.name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path.resolve()
    raise ValueError(f"{base} and a thousand like it exist already")


class _Epochs(Batches):
    """Batches that end after a number of epochs."""

    def __init__(self, batches: Batches, epochs: int) -> None:
        self._inner, self._most = batches, epochs
        self.first = batches.first

    def next(self) -> Any | None:
        batch = self._inner.next()
        return None if self._inner.epochs >= self._most else batch


def _limited(batches: Batches, epochs: int | None) -> Batches:
    return batches if epochs is None else _Epochs(batches, epochs)
