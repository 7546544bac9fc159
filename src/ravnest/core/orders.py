"""What a worker is told while it trains, and what it tells: frozen tagged structs."""

from __future__ import annotations

import msgspec

from .metrics import StageMetrics

__all__ = [
    "EndAfter", "Order", "Save", "Stop",
    "Evaluated", "Failed", "Linked", "Lost", "Ready", "Reports", "Saved", "Updated",
]  # fmt: skip


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """A strict record with its name in it."""


class EndAfter(_Message, frozen=True):
    """Train no further than this many updates."""

    updates: int


class Save(_Message, frozen=True):
    """Write what you own after your last update to this file; an agent chooses its own and sends it on."""

    path: str = ""


class Stop(_Message, frozen=True):
    """Leave."""


class Ready(_Message, frozen=True):
    """The stage is loaded, its links are there, and it waits for microbatches."""

    stage: int


class Linked(_Message, frozen=True):
    """There is a link to this peer: how it came about, why not better, and what would make it better."""

    peer: str
    how: str  # direct, punched or relayed
    reason: str
    hint: str = ""


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
    """Why the stage ends. `is_consequence`: because a neighbour left first."""

    reason: str
    is_consequence: bool = False


Order = EndAfter | Save | Stop
Reports = Ready | Linked | Lost | Evaluated | Updated | Saved | Failed
