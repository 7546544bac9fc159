"""What a worker is told while it trains, and what it tells: frozen tagged structs."""

from __future__ import annotations

from typing import Literal

import msgspec

from .metrics import StageMetrics
from .peers import Peer

__all__ = [
    "Abandon", "Average", "Commit", "EndAfter", "LayRings", "Order", "Save", "Seat", "Stop",
    "Averaged", "Begun", "Evaluated", "Failed", "Linked", "Lost", "NotAveraged", "Ready", "Reports", "RingsReady",
    "Saved", "Shifted", "Updated",
]  # fmt: skip


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """A strict record with its name in it."""


class EndAfter(_Message, frozen=True):
    """Train no further than this many updates."""

    updates: int


class Save(_Message, frozen=True):
    """Write what you own after your last update to this file; an agent chooses its own and sends it on.

    With `state` it is not the model's weights but all that was learnt: "light", or "whole" to go on bit for bit. It is
    written while training goes on. `at` is after how many updates, or -1 for now.
    """

    path: str = ""
    state: Literal["", "light", "whole"] = ""
    at: int = -1


class Stop(_Message, frozen=True):
    """Leave."""


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node's place in a ring: who is in it, in their order, and which tensors are averaged, in theirs."""

    ring: int
    members: tuple[str, ...]
    targets: tuple[str, ...]


class LayRings(_Message, frozen=True):
    """These are your rings from now on; have links to these peers. `generation` is of the rings."""

    generation: int
    seats: tuple[Seat, ...]
    peers: tuple[Peer, ...]


class Average(_Message, frozen=True, kw_only=True):
    """Average with those in `weights` (by node; who is not in it is left out), from the snapshot of this round.

    The snapshot is taken at the next update boundary, once for all attempts of a round.
    """

    generation: int
    round: int
    attempt: int
    weights: dict[str, float]
    codec: str = "fp32"
    outer: str = "plain"
    piece_elements: int = 2**18
    within_s: float = 600.0


class Commit(_Message, frozen=True):
    """Everybody has the same average of this round: take it over."""

    round: int
    attempt: int


class Abandon(_Message, frozen=True):
    """Nothing comes of this round."""

    round: int
    reason: str = ""


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
    """The losses of microbatches, by their numbers, and what else the loss function reports of each."""

    values: dict[int, tuple[float | None, ...]]  # None for what is not finite


class Evaluated(_Message, frozen=True):
    number: int
    batch: int
    values: tuple[float | None, ...]


class Updated(_Message, frozen=True):
    metrics: StageMetrics


class Saved(_Message, frozen=True):
    """The file is there, after so many updates; or it is not, and `failure` says why: training goes on."""

    stage: int
    updates: int = 0
    failure: str = ""
    is_state: bool = False  # all that was learnt, not the model's weights


class Failed(_Message, frozen=True):
    """Why the stage ends. `is_consequence`: because a neighbour left first."""

    reason: str
    is_consequence: bool = False


class RingsReady(_Message, frozen=True):
    """All ring links of this generation of the rings are there."""

    generation: int


class Begun(_Message, frozen=True):
    """My snapshot of this round is taken."""

    round: int


class Averaged(_Message, frozen=True, kw_only=True):
    """The averages of all my rings are there; `digests` says which, by ring."""

    round: int
    attempt: int
    digests: dict[int, str]
    seconds: float = 0.0
    sent_bytes: int = 0
    saved_bytes: int = 0  # by the codec, of what float32 would have taken
    codec_error: float = 0.0  # what the codec lost here and owes the next round, over the averages (root mean squares)


class NotAveraged(_Message, frozen=True):
    """This attempt failed here; `peer` is who did not answer, or whose numbers were refused."""

    round: int
    attempt: int
    reason: str
    peer: str = ""


class Shifted(_Message, frozen=True):
    """The average of this round has been taken over."""

    round: int


Order = EndAfter | Save | Stop | LayRings | Average | Commit | Abandon
Reports = (
    Ready | Linked | Lost | Evaluated | Updated | Saved | Failed | RingsReady | Begun | Averaged | NotAveraged | Shifted
)  # fmt: skip
