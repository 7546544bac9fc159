"""Commands to a stage while it trains, and its reports."""

from __future__ import annotations

from typing import Literal

import msgspec

from ravnest.core.config import TaggedRecord
from ravnest.core.metrics import StageMetrics
from ravnest.protocol.peer import Peer

__all__ = [
    "MAX_CANDIDATES",
    "AbortAveraging",
    "StartAveraging",
    "CommitAverage",
    "EndAfter",
    "FormRings",
    "Command",
    "SaveState",
    "RingPosition",
    "StopStage",
    "AverageReady",
    "AveragingStarted",
    "EvaluationReport",
    "PredictionReport",
    "StageFailed",
    "LinkReport",
    "LossReport",
    "AveragingFailed",
    "StageReady",
    "Report",
    "RingsReady",
    "StateSaved",
    "AverageApplied",
    "StepReport",
]


MAX_CANDIDATES = 64  # tokens of a prediction


class EndAfter(TaggedRecord, frozen=True):
    """Stop training after this number of updates."""

    updates: int


class SaveState(TaggedRecord, frozen=True):
    """Write the weights of the stage after its last update to `path`, which the agent chooses, and which it uploads.

    With `state`, write weights and optimizer state while training continues: "light", or "whole" to resume bit for
    bit. `at` is the number of updates at which it is taken, or -1 for now.
    """

    path: str = ""
    state: Literal["", "light", "whole"] = ""
    at: int = -1


class StopStage(TaggedRecord, frozen=True):
    """Stop and release the stage."""


class RingPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ring of which a node is a member: its members and the names of the averaged tensors, both in ring order."""

    ring: int
    members: tuple[str, ...]
    targets: tuple[str, ...]


class FormRings(TaggedRecord, frozen=True):
    """Replace the rings of a node, and connect to these peers. `generation` is that of the rings."""

    generation: int
    seats: tuple[RingPosition, ...]
    peers: tuple[Peer, ...]


class StartAveraging(TaggedRecord, frozen=True, kw_only=True):
    """Average the snapshot of this round with the nodes in `weights`, by name; other members are left out.

    The snapshot is taken between two actions of the stage, once for all attempts of a round.
    """

    generation: int
    round: int
    attempt: int
    weights: dict[str, float]
    codec: str = "fp32"
    outer: str = "plain"
    piece_elements: int = 2**18
    within_s: float = 600.0


class CommitAverage(TaggedRecord, frozen=True):
    """All members have the same average of this round: apply it."""

    round: int
    attempt: int


class AbortAveraging(TaggedRecord, frozen=True):
    """Discard this round."""

    round: int
    reason: str = ""


class StageReady(TaggedRecord, frozen=True):
    """The stage is loaded, connected, and waits for microbatches."""

    stage: int


class LinkReport(TaggedRecord, frozen=True):
    """A link to a peer was established: its kind, the reason why it is not a better one, and a hint to improve it."""

    peer: str
    kind: str  # direct, punched, relayed, unix or memory
    reason: str
    hint: str = ""


class LossReport(TaggedRecord, frozen=True):
    """Losses by number of microbatch, each followed by the other values that the loss function returns."""

    values: dict[int, tuple[float | None, ...]]  # None if not finite


class EvaluationReport(TaggedRecord, frozen=True):
    number: int
    batch: int
    values: tuple[float | None, ...]


class PredictionReport(TaggedRecord, frozen=True):
    """The most probable next tokens of each sample, best first, at most `MAX_CANDIDATES`, and their scores."""

    number: int
    tokens: tuple[tuple[int, ...], ...]
    scores: tuple[tuple[float | None, ...], ...]  # None if not finite


class StepReport(TaggedRecord, frozen=True):
    metrics: StageMetrics


class StateSaved(TaggedRecord, frozen=True):
    """The file is written, with the state after `updates`; or not, for the reason `failure`, and training continues."""

    stage: int
    updates: int = 0
    failure: str = ""
    is_state: bool = False  # weights and optimizer state, not only weights


class StageFailed(TaggedRecord, frozen=True):
    """The stage ended, for `reason`. `is_consequence`: because a neighbour ended first.

    `exhausted_bytes`: it ran out of memory, with so much in use; 0 if it ended for another reason.
    """

    reason: str
    is_consequence: bool = False
    exhausted_bytes: int = 0


class RingsReady(TaggedRecord, frozen=True):
    """All links of this generation of rings are connected."""

    generation: int


class AveragingStarted(TaggedRecord, frozen=True):
    """The snapshot of this round is taken."""

    round: int


class AverageReady(TaggedRecord, frozen=True, kw_only=True):
    """The averages of all rings of this node are computed; `digests` has their digest by ring."""

    round: int
    attempt: int
    digests: dict[int, str]
    seconds: float = 0.0
    sent_bytes: int = 0
    saved_bytes: int = 0  # by the codec, compared with float32
    codec_error: float = 0.0  # RMS of the residual carried to the next round, over RMS of the averages


class AveragingFailed(TaggedRecord, frozen=True):
    """This attempt failed; `peer` did not answer, or sent numbers that were rejected."""

    round: int
    attempt: int
    reason: str
    peer: str = ""


class AverageApplied(TaggedRecord, frozen=True):
    """The average of this round is applied."""

    round: int


Command = EndAfter | SaveState | StopStage | FormRings | StartAveraging | CommitAverage | AbortAveraging
Report = (
    StageReady | LinkReport | LossReport | EvaluationReport | PredictionReport | StepReport | StateSaved | StageFailed |
    RingsReady | AveragingStarted | AverageReady | AveragingFailed | AverageApplied
)  # fmt: skip
