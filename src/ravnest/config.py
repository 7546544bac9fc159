"""Training configuration: every option once, with its default, limits and help text.

`ravnest train` and `ravnest plan` build their command-line options from the fields of `TrainingConfig`
(`ravnest.cli.options`): a new field is also a new flag.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ravnest.core.config import config, require
from ravnest.core.units import format_seconds, parse_bytes
from ravnest.trackers import TRACKERS

if TYPE_CHECKING:
    from ravnest.pipeline.staleness import Correction

__all__ = ["LOCAL", "Option", "TrainingConfig", "num_cores", "options"]

T = TypeVar("T")

LOCAL = "Nodes on this machine (--local)"
LISTEN = "Nodes that join (--listen)"
_PYTHON = ""  # no command-line option
_LENGTH = "Length of the run"
_PIPELINE = "Pipeline"
_CLUSTERS = "Clusters and averaging"
_FILES = "Checkpoints and files"

_LOCAL = re.compile(r"local:([1-9][0-9]*)")
_MICROBATCHES = 8  # of a batch, while the number of nodes that will join is unknown


@dataclass(frozen=True)
class Option:
    """A field as users see it: help text, limits, and the group and placeholder of its command-line option."""

    name: str
    default: object
    group: str
    help: str
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    is_hidden: bool = False  # not shown by --help

    @property
    def flag(self) -> str:
        """`settle_time_s` -> `--settle-time`: on the command line a duration has its own unit."""
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    @property
    def text(self) -> str:
        """The help text with the default; where the default is None, False or empty, the help text explains it."""
        if self.default is None or self.default is False or self.default in ("", ()):
            return self.help
        default = format_seconds(self.default) if isinstance(self.default, float) else self.default
        return f"{self.help} Default: {default}."

    def check(self, value: Any) -> None:
        if value is None:
            return
        for one in value if isinstance(value, tuple) else (value,):
            require(
                not self.choices or one in self.choices,
                f"{self.name} must be one of {', '.join(self.choices)}, got {one!r}",
            )
        require(self.min is None or value >= self.min, f"{self.name} must be >= {self.min}, got {value}")
        require(self.max is None or value <= self.max, f"{self.name} must be <= {self.max}, got {value}")


def _option(default: T, group: str, help: str, **limits: Any) -> T:  # noqa: A002
    """Declare a field of `TrainingConfig`; `limits` are further fields of `Option`."""
    declared: T = field(default=default, metadata={"group": group, "help": help, **limits})
    return declared


def _default_correction() -> Correction:
    from ravnest.pipeline.staleness import DEFAULT  # it imports torch, which `ravnest --help` does not need

    return DEFAULT


@config
class TrainingConfig:
    """How to train a job. One batch of the data is one optimizer step, split into microbatches.

    None leaves a choice to the planner, or switches the feature off, as the field says.
    """

    on: str = _option(
        "local:2", _PYTHON, "local:N for N nodes on this machine; [HOST]:PORT to listen there for nodes that join."
    )
    correction: Correction = field(
        default_factory=_default_correction,
        metadata={
            "group": _PYTHON,
            "help": "Correction of late gradients, such as ravnest.staleness.lr_discount(). Default: look-ahead.",
        },
    )

    steps: int | None = _option(
        None, _LENGTH, "Optimizer steps; one batch of the data is one step. Without it: until the data ends.", min=1
    )
    epochs: int | None = _option(None, _LENGTH, "Passes over the data. Without it: no limit.", min=1)
    validate_every: int = _option(0, _LENGTH, "Steps between evaluations on the held-out data; 0 for none.", min=0)
    validation_batches: int = _option(32, _LENGTH, "Held-out batches per evaluation.", min=1)
    seed: int = _option(0, _LENGTH, "Random seed; the same seed and plan give the same weights, bit for bit.")

    max_length: int | None = _option(
        None, _LENGTH, "Largest length of the data, if it varies from batch to batch. Without it: it must not vary.",
        min=2,
    )  # fmt: skip
    max_batch_size: int | None = _option(
        None, _LENGTH, "Most samples in a batch. Without it: those of the largest of the first 8 batches.", min=1
    )

    verify: bool = _option(
        True, _LENGTH, "Compare the traced program with the model itself on one microbatch before the first step."
    )

    mode: str = _option(
        "async", _PIPELINE, "async: no pipeline bubbles, gradients one step late. sync: the results of plain PyTorch.",
        choices=("async", "sync"),
    )  # fmt: skip
    microbatch: int | None = _option(
        None, _PIPELINE, "Samples per microbatch. Without it: the batch divided by the microbatches per step.", min=1
    )
    microbatches_per_step: int | None = _option(
        None, _PIPELINE, "Microbatches per optimizer step. Without it: about as many as the pipeline has in flight.",
        min=1,
    )  # fmt: skip
    max_staleness: int | None = _option(
        None, _PIPELINE, "Most optimizer steps a gradient may be late. Without it: what full pipelines need.", min=0
    )
    memory_mode: str = _option(
        "compact", _PIPELINE, "Form of weights, gradients and optimizer state: compact, exact (all float32), or small "
        "(least memory: synchronous, recomputes activations, slower).",
        choices=("compact", "exact", "small"),
    )  # fmt: skip
    recompute: bool = _option(
        False, _PIPELINE, "Recompute activations in the backward pass instead of storing them: less memory, more work."
    )
    autocast: str = _option(
        "none", _PIPELINE, "Precision of products: none (fp32), bf16, or fp16 with loss scaling. Devices without bf16 "
        "compute in fp16.", choices=("none", "bf16", "fp16"),
    )  # fmt: skip
    activation_compression: str = _option(
        "none", _PIPELINE, "Compression of activations and gradients between stages: none, bf16 or int8.",
        choices=("none", "bf16", "int8"),
    )  # fmt: skip

    memory: str | None = _option(
        None, LOCAL, "Memory of each node, such as 1GB, or 1GB,2GB,... for one size per node. Without it: no limit.",
        metavar="SIZE[,SIZE...]",
    )  # fmt: skip
    device: str = _option(
        "auto", LOCAL, "Device of each node: auto (an accelerator of its own, or the processor), cpu, cuda:0, ...; or "
        "one per node, such as cuda:0,cpu.", metavar="DEVICE[,DEVICE...]",
    )  # fmt: skip
    threads: int | None = _option(
        None, LOCAL, "Torch threads of each node. Without it: the cores of this machine divided by the nodes.", min=1
    )
    clusters: int = _option(
        1, LOCAL, "With --local: number of clusters that average their parameters; 0: the planner groups the nodes by "
        "memory and speed, as in a fleet.", min=0, metavar="C",
    )  # fmt: skip
    cores: str | None = _option(
        None, LOCAL, "Processor core of each node: with 0,1,1 the last two share one.", is_hidden=True
    )
    speeds: str | None = _option(
        None, LOCAL, "Speed of each node relative to a core of this machine, such as 1,0.5,0.5.", is_hidden=True
    )

    processor_shares: str | None = _option(
        None, LOCAL, "Share of a core that each node uses, such as 1,0.5,0.5: it pauses while it has used more.",
        is_hidden=True,
    )  # fmt: skip

    min_nodes: int = _option(2, LISTEN, "Nodes that must have joined before training starts.", min=1)
    settle_time_s: float = _option(
        5.0, LISTEN, "Start once no node has joined for this time, from 0s to 1d.", min=0, max=86400, metavar="TIME"
    )
    advertise: str | None = _option(
        None, LISTEN, "Addresses in the ticket. Without it: those of this machine.", metavar="HOST:PORT[,...]"
    )
    ticket_valid: str = _option("7d", LISTEN, "Time until the printed ticket expires.", metavar="TIME")
    ticket_uses: int | None = _option(
        None, LISTEN, "Number of nodes that may join with the printed ticket. Without it: no limit.", min=1
    )
    coordinator_dir: Path | str | None = _option(
        None, LISTEN, "Directory of the coordinator's keys, members and journal; nodes of an earlier run can rejoin "
        "with it. Without it: one per port in the user's data directory.",
        metavar="DIR",
    )  # fmt: skip

    allow_single_node: bool = _option(False, _CLUSTERS, "Allow a cluster of one node that holds the whole model.")
    min_stages: int | None = _option(
        None, _CLUSTERS, "Least stages (nodes) per cluster. Without it: 2, or 1 with --allow-single-node.", min=1
    )
    average_every: int | None = _option(
        None, _CLUSTERS, "Samples per cluster between two averagings; 0 for never. Without it: 4 batches.", min=0
    )
    averaging_compression: str = _option(
        "auto", _CLUSTERS, "Compression of averaged parameters: fp32, bf16, int8, or auto to choose by bandwidth.",
        choices=("auto", "fp32", "bf16", "int8"),
    )  # fmt: skip
    outer_optimizer: str = _option(
        "none", _CLUSTERS, "Outer optimizer applied to each average: none or nesterov.", choices=("none", "nesterov")
    )
    replicas: int | None = _option(
        None, _CLUSTERS, "Replicas of each stage on other nodes. Without it: 1 if there is a single cluster, else 0.",
        min=0,
    )  # fmt: skip
    spares: int = _option(0, _CLUSTERS, "Nodes held back to replace nodes that fail.", min=0)

    run_dir: Path | str | None = _option(
        None, _FILES, "Directory of the run. Without it: a new one under runs/.", metavar="DIR"
    )
    checkpoint_every: int = _option(0, _FILES, "Steps between checkpoints; 0 for none.", min=0)
    keep_checkpoints: int = _option(3, _FILES, "Number of newest checkpoints to keep.", min=1)
    checkpoint_to: str = _option(
        "", _FILES, "URL that checkpoints are also copied to, such as s3://... or sftp://...", metavar="URL"
    )
    resume: Path | str | None = _option(
        None, _FILES, "Continue a run: its directory, one of its checkpoints, or a URL of copies.", metavar="RUN"
    )

    track: Sequence[str] = _option(
        tuple[str, ...](), _FILES, "Tracker that also gets configuration, plan and metrics; may be given several "
        "times. In Python: a name or a list of names.",
        choices=TRACKERS,
    )  # fmt: skip
    dashboard_port: int | None = _option(
        None, _FILES, "Port of the dashboard on 127.0.0.1; 0 for no dashboard. Without it: a free port.", min=0,
        max=65535,
    )  # fmt: skip

    def __post_init__(self) -> None:
        given = [self.track] if isinstance(self.track, str) else self.track
        object.__setattr__(self, "track", tuple(dict.fromkeys(given)))
        for option in _documented_fields():
            option.check(getattr(self, option.name))
        require(
            _LOCAL.fullmatch(self.on) is not None or self.listens,
            f"on must be local:N for N nodes on this machine, or [HOST]:PORT to listen at, got {self.on!r}",
        )
        require(
            self.microbatch is None or self.microbatches_per_step is None,
            "give microbatch or microbatches_per_step, not both",
        )

    @property
    def is_synchronous(self) -> bool:
        """Whether every gradient is applied to the weights that it was computed on."""
        return self.mode == "sync" or self.memory_mode == "small"

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes activations."""
        return self.recompute or self.memory_mode == "small"

    @property
    def listens(self) -> bool:
        """Whether the run listens for nodes that join."""
        return ":" in self.on and not self.on.startswith("local") and self.on.rpartition(":")[2].isdecimal()

    @property
    def num_nodes(self) -> int:
        match = _LOCAL.fullmatch(self.on)
        assert match is not None, "the number of nodes that join is unknown"
        return int(match[1])

    @property
    def least_stages(self) -> int:
        """Least nodes of a cluster; with 2, no node holds the whole model."""
        return self.min_stages or (1 if self.allow_single_node else 2)

    @property
    def ring_copies(self) -> int:
        """Sets of weights that averaging holds: snapshot, average, codec residual, outer reference and momentum."""
        if self.average_every == 0:
            return 0
        return 2 + (self.averaging_compression != "fp32") + 2 * (self.outer_optimizer != "none")

    def microbatch_of(self, batch_size: int) -> int:
        """Samples per microbatch of a batch; by default a local run has one microbatch more than nodes."""
        count = self.microbatches_per_step or (_MICROBATCHES if self.listens else self.num_nodes + 1)
        return min(batch_size, self.microbatch or -(-batch_size // min(count, batch_size)))

    @property
    def num_threads(self) -> int:
        """Torch threads of each worker: its share of the cores, at least one."""
        return self.threads or (1 if self.cores else max(1, num_cores() // self.num_nodes))

    @property
    def device_of(self) -> tuple[str, ...]:
        """The device of each node, as given."""
        chosen = tuple(text.strip() for text in self.device.split(","))
        if len(chosen) == 1:
            return chosen * self.num_nodes
        require(
            len(chosen) == self.num_nodes,
            f"device must be one device, or one for each of {self.num_nodes} nodes, got {self.device!r}",
        )
        return chosen

    @property
    def core_of(self) -> tuple[int, ...] | None:
        """The processor core of each node."""
        if self.cores is None:
            return None
        try:
            chosen = tuple(int(text) for text in self.cores.split(","))
        except ValueError:
            raise ValueError(f"cores must be numbers such as 0,1,1, got {self.cores!r}") from None
        require(len(chosen) == self.num_nodes, f"{self.num_nodes} nodes need as many cores, got {len(chosen)}")
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        require(set(chosen) <= usable, f"cores must be among {sorted(usable)}, got {sorted(set(chosen) - usable)}")
        return chosen

    @property
    def speed_of(self) -> tuple[float, ...] | None:
        """The speed of each node relative to a core of this machine; by default its share of a core, if it has one."""
        return self.share_of if self.speeds is None else self._numbers("speeds", 0.001, 1000)

    @property
    def share_of(self) -> tuple[float, ...] | None:
        """The share of a core that each node uses."""
        return None if self.processor_shares is None else self._numbers("processor_shares", 0.01, 1)

    def _numbers(self, name: str, least: float, most: float) -> tuple[float, ...]:
        """Return the numbers in a field, one per node."""
        text: str = getattr(self, name)
        try:
            chosen = tuple(float(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"{name} must be numbers such as 1,0.5,0.5, got {text!r}") from None
        require(len(chosen) == self.num_nodes, f"{self.num_nodes} nodes need as many {name}, got {len(chosen)}")
        require(all(least <= s <= most for s in chosen), f"{name} must be from {least:g} to {most:g}, got {text!r}")
        return chosen

    @property
    def memory_bytes(self) -> tuple[int, ...] | None:
        """The memory of each node."""
        if self.memory is None:
            return None
        sizes = tuple(parse_bytes(text) for text in self.memory.split(","))
        return sizes * self.num_nodes if len(sizes) == 1 else sizes


def _documented_fields() -> Iterator[Option]:
    for each in dataclasses.fields(TrainingConfig):
        default = None if each.default is dataclasses.MISSING else each.default
        yield Option(name=each.name, default=default, **each.metadata)


def options() -> list[Option]:
    """The fields of `TrainingConfig` that are command-line options, in order."""
    return [each for each in _documented_fields() if each.group != _PYTHON]


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_ARGS = "".join(f"        {each.name}: {each.text}\n" for each in _documented_fields())
TrainingConfig.__doc__ = f"{TrainingConfig.__doc__}\n    Args:\n{_ARGS}    "
