"""What members of a ring say to each other, as frozen tagged structs. The numbers travel behind a `Piece` as raw bytes.

Against the ring go `Ready` and `Taken`, along it go the pieces, both ways goes `Stop`. Each names its round and
attempt, so that what is late can be told from what is new.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from ravnest.rings.ring import Phase

__all__ = ["Message", "Piece", "Ready", "Stop", "Taken"]

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
Sentence: TypeAlias = Annotated[str, msgspec.Meta(max_length=1000)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A strict record with its name in it."""

    round: Count
    attempt: Count
    ring: Count


class Ready(_Message, frozen=True):
    """The sender is in this ring now: the member before it may send."""


class Piece(_Message, frozen=True, omit_defaults=True):
    """A piece follows, encoded; or nothing does, and it lies in the sender's window, from byte `at` on."""

    phase: Phase
    step: Count
    index: Count
    at: Count | None = None


class Taken(_Message, frozen=True):
    """All pieces that were to be read in the receiver's window have been: it may write there again."""


class Stop(_Message, frozen=True):
    """This ring has failed in this attempt: because of whom and why. `bad`: a contribution of theirs is not finite."""

    member: Name
    why: Sentence
    bad: bool = False


Message: TypeAlias = Ready | Piece | Taken | Stop
