"""What a worker is told, and what it tells: frozen tagged structs on its control link."""

from __future__ import annotations

import msgspec

from ..core.schedule import Rule
from ..runtime.loop import Role
from ..runtime.metrics import StageMetrics
from ..runtime.settings import Settings

__all__ = [
    "Assign", "EndAfter", "Orders", "Save", "Stop",
    "Evaluated", "Failed", "Lost", "Ready", "Reports", "Saved", "Updated",
]  # fmt: skip


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """A strict record with its name in it."""


class Assign(_Message, frozen=True, kw_only=True):
    """Be this stage. Its file follows as a buffer; its weights are in a file, or made from the seed (no path)."""

    settings: Settings
    rule: Rule
    role: Role
    max_batch: int
    threads: int
    core: int = -1  # to compute on, where the system lets one choose; -1 for any
    weights: str = ""


class EndAfter(_Message, frozen=True):
    """Train no further than this many updates."""

    updates: int


class Save(_Message, frozen=True):
    """Write what you own after your last update to this file."""

    path: str


class Stop(_Message, frozen=True):
    """Leave."""


class Ready(_Message, frozen=True):
    """The stage is loaded and waits for microbatches."""

    stage: int


class Lost(_Message, frozen=True):
    """The loss of a microbatch, and what else the loss function reports."""

    microbatch: int
    values: tuple[float | None, ...]  # None for what is not finite


class Evaluated(_Message, frozen=True):
    number: int
    batch: int
    values: tuple[float | None, ...]


class Updated(_Message, frozen=True):
    metrics: StageMetrics


class Saved(_Message, frozen=True):
    stage: int


class Failed(_Message, frozen=True):
    """Why the worker is about to leave. `is_consequence`: because a neighbour left first."""

    reason: str
    is_consequence: bool = False


Orders = Assign | EndAfter | Save | Stop
Reports = Ready | Lost | Evaluated | Updated | Saved | Failed
