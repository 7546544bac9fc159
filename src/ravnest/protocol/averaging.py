"""Messages between members of a ring: frozen tagged structs. The numbers follow a `Chunk` as raw bytes.

Chunks go along the ring, `AttemptReady` and `ChunkTaken` against it, `AttemptAborted` both ways. Each message names
its round and attempt, so that late messages can be recognized.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

__all__ = ["Phase", "Message", "Chunk", "AttemptReady", "AttemptAborted", "ChunkTaken"]

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
Sentence: TypeAlias = Annotated[str, msgspec.Meta(max_length=1000)]


class Phase(enum.IntEnum):
    """The two phases of a ring all-reduce: reduce-scatter, then all-gather."""

    REDUCE = 0
    GATHER = 1


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A strict tagged record of one ring in one attempt."""

    round: Count
    attempt: Count
    ring: Count


class AttemptReady(_Message, frozen=True):
    """The sender has opened this ring: the member before it may send chunks."""


class Chunk(_Message, frozen=True, omit_defaults=True):
    """A chunk. Its encoded bytes follow, unless `offset` is their position in the sender's shared buffer."""

    phase: Phase
    step: Count
    index: Count
    offset: Count | None = None


class ChunkTaken(_Message, frozen=True):
    """The sender has read every chunk in the receiver's shared buffer: the receiver may overwrite it."""


class AttemptAborted(_Message, frozen=True):
    """This ring has failed in this attempt, because of `member`. `is_not_finite`: its contribution is not finite."""

    member: Name
    reason: Sentence
    is_not_finite: bool = False


Message: TypeAlias = AttemptReady | Chunk | ChunkTaken | AttemptAborted
