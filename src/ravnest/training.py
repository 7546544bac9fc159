"""How to train: what a user may say about it, checked when it is said."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .core.config import config, parse_bytes, require
from .runtime import corrections
from .runtime.corrections import Correction

__all__ = ["Training", "num_cores"]

_LOCAL = re.compile(r"local:([1-9][0-9]*)")
_PARTS = 8  # microbatches of a batch where nobody says how many, and the nodes are not known yet


@config
class Training:
    """How to train. Every field has a sensible default; None leaves it to the planner, and `steps` to the data's end.

    One batch of the data is one step (update). It is split into `accumulate` microbatches, or into ones of
    `microbatch` samples. `mode` is "async" (no bubbles, gradients one update late) or "sync" (flush each step: bit
    for bit what plain PyTorch does). `memory` is what each node may use, such as "1GB,2GB"; `cores` are the processor
    cores the nodes compute on, such as "0,1,1": nodes that share one are planned to be slower. `speeds` says how fast
    each node is by other causes (a quota, say), such as "1,0.5,0.5" of what is measured here.

    `on` is "local:N" for N processes on this machine, or "[HOST]:PORT" to listen there and train on whoever joins with
    the ticket that is printed: not before `min_nodes` are there, and nobody has come for `wait_s`. What belongs to the
    ticket is kept in the folder `coordinator` (by default one for each port), so that nodes come back to the next run.
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
    checkpoint_every: int = 0  # steps between checkpoints; 0: none
    keep_checkpoints: int = 3  # the newest so many
    checkpoint_to: str = ""  # a URL that fsspec knows, for copies of them
    resume: Path | str | None = None  # the folder of a run or of a checkpoint, or a URL of copies, to go on from
    seed: int = 0
    folder: Path | str | None = None
    min_nodes: int = 2
    wait_s: float = 15.0
    whole: bool = False  # one node may hold the whole model
    min_stages: int | None = None  # nodes that every cluster has at least, where it can
    average_every: int | None = None  # samples of a cluster between two averagings of clusters; 0: never
    codec: str = "auto"  # of what clusters average: fp32, bf16 or int8; auto: as exact as the lines allow
    outer: str = "plain"  # what becomes of an average: plain, or nesterov
    replicas: int | None = None  # copies of each stage on other nodes; None: one if there is one cluster alone
    spares: int = 0  # nodes that are held back, to take the place of others
    advertise: str | None = None  # addresses for the ticket: "example.org:7700,192.168.1.5:7700"
    ticket_valid: str = "7d"
    ticket_uses: int | None = None
    coordinator: Path | str | None = None

    def __post_init__(self) -> None:
        require(self.mode in ("async", "sync"), f"mode is async or sync, not {self.mode!r}")
        require(
            _LOCAL.fullmatch(self.on) is not None or self.listens,
            f"on is local:N with N nodes on this machine, or [HOST]:PORT to listen at, not {self.on!r}",
        )
        require(self.min_stages is None or self.min_stages >= 1, f"min_stages must be 1 or more, not {self.min_stages}")
        require(self.replicas is None or self.replicas >= 0, f"replicas must be 0 or more, not {self.replicas}")
        require(self.spares >= 0, f"spares must be 0 or more, not {self.spares}")
        require(self.min_nodes >= 1, f"min_nodes must be at least 1, not {self.min_nodes}")
        require(0 <= self.wait_s <= 86400, f"wait_s is from 0 to a day, not {self.wait_s}")
        require(self.autocast in ("none", "bf16"), f"autocast is none or bf16, not {self.autocast!r}")
        compressions = ("none", "bf16", "int8")
        require(self.compression in compressions, f"compression is none, bf16 or int8, not {self.compression!r}")
        codecs = ("auto", "fp32", "bf16", "int8")
        require(self.codec in codecs, f"codec is auto, fp32, bf16 or int8, not {self.codec!r}")
        require(self.outer in ("plain", "nesterov"), f"outer is plain or nesterov, not {self.outer!r}")
        require(
            self.average_every is None or self.average_every >= 0,
            f"average_every is a number of samples, 0 for never, not {self.average_every}",
        )
        require(self.steps is None or self.steps >= 1, f"steps must be at least 1, not {self.steps}")
        require(self.epochs is None or self.epochs >= 1, f"epochs must be at least 1, not {self.epochs}")
        require(self.threads is None or self.threads >= 1, f"threads must be at least 1, not {self.threads}")
        require(self.checkpoint_every >= 0, f"checkpoint_every must be 0 or more, not {self.checkpoint_every}")
        require(self.keep_checkpoints >= 1, f"keep_checkpoints must be at least 1, not {self.keep_checkpoints}")
        require(
            self.max_staleness is None or self.max_staleness >= 0,
            f"max_staleness is a number of updates, 0 or more, not {self.max_staleness}",
        )

    @property
    def listens(self) -> bool:
        """Whether to train on whoever joins."""
        return ":" in self.on and not self.on.startswith("local") and self.on.rpartition(":")[2].isdecimal()

    @property
    def num_nodes(self) -> int:
        match = _LOCAL.fullmatch(self.on)
        assert match is not None, "how many nodes join is not known"
        return int(match[1])

    @property
    def parts(self) -> int:
        """Microbatches of a batch, if nobody says otherwise: about as many as are in flight."""
        return self.accumulate or (_PARTS if self.listens else self.num_nodes + 1)

    @property
    def least_stages(self) -> int:
        """Nodes of a cluster, at the least: with 2 no node holds the whole model."""
        return self.min_stages or (1 if self.whole else 2)

    @property
    def ring_copies(self) -> int:
        """Sets of weights that averaging keeps: snapshot and average, what a codec owes, reference and momentum."""
        if self.average_every == 0:
            return 0
        return 2 + (self.codec != "fp32") + 2 * (self.outer != "plain")

    def microbatch_of(self, batch_size: int) -> int:
        return min(batch_size, self.microbatch or -(-batch_size // min(self.parts, batch_size)))

    @property
    def num_threads(self) -> int:
        """Torch threads of each worker: the cores shared out, one at the least."""
        return self.threads or (1 if self.cores else max(1, num_cores() // self.num_nodes))

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


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
