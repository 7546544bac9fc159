"""How a copy goes from one node to another: a file over a link, cut into pieces, checked by its digest.

    taker  Ask: these tensors ->          <- Offer: so many bytes, after so many updates   giver
                                          <- Piece, Piece, ...
                                          <- Done: their digest

The giver sends of its copy what the taker asks for; the taker takes no more bytes than its stage can need. What is in
the file is checked when a stage begins from it (`graph.states`), like everything that comes from outside.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from ..core.errors import FrameError, LinkError, RavnestError
from ..net.link import Link
from ..net.pace import Pace

__all__ = ["MESSAGES", "NotGiven", "give", "receive"]

_PIECE_BYTES = 2**18
_SAY_S = 60.0
_PREPARE_S = 600.0  # until a giver's stage comes to a pause and its copy is written


class NotGiven(RavnestError):
    """The other side cannot give the copy, and says why."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """A strict record with its name in it."""


class Ask(_Message, frozen=True):
    """Which parameters and buffers of the copy are wanted; none: all of it."""

    names: tuple[str, ...]


class Offer(_Message, frozen=True):
    updates: int
    num_bytes: int


class Piece(_Message, frozen=True):
    """The next bytes follow."""


class Done(_Message, frozen=True):
    digest: str


class Cannot(_Message, frozen=True):
    reason: str


MESSAGES = Ask | Offer | Piece | Done | Cannot


def give(
    link: Link,
    prepare: Callable[[tuple[str, ...]], tuple[Path, int]],
    *,
    turn: Callable[[float], bool] | None = None,
    pace: Pace | None = None,
) -> int:
    """Send what is asked for: `prepare(names)` makes the file and says after how many updates it was. Returns bytes.

    `turn` waits until nothing more urgent is to be sent, `pace` keeps to the owner's limit.
    """
    asked = link.receive(_no_bytes, deadline_s=_SAY_S)
    if not isinstance(asked, Ask):
        raise FrameError(f"{link.peer} says {type(asked).__name__} where it should ask")
    try:
        path, updates = prepare(asked.names)
    except (RavnestError, OSError) as error:
        link.send(Cannot(str(error)[:500]), deadline_s=_SAY_S)
        raise
    num_bytes, digest = path.stat().st_size, hashlib.sha256()
    link.send(Offer(updates, num_bytes), deadline_s=_SAY_S)
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            if turn is not None:
                turn(_SAY_S)
            if pace is not None:
                time.sleep(pace.book(len(piece)))
            digest.update(piece)
            link.send(Piece(), [piece], deadline_s=_SAY_S)
    link.send(Done(digest.hexdigest()), deadline_s=_SAY_S)
    link.receive(_no_bytes, deadline_s=_SAY_S)  # a link that is closed at once might lose what was sent last
    return num_bytes


def receive(link: Link, names: tuple[str, ...], path: Path, *, max_bytes: int) -> int:
    """Write what the other side gives to `path`; after how many updates it was. Raises `NotGiven`, `LinkError`."""
    link.send(Ask(names), deadline_s=_SAY_S)
    offer = link.receive(_no_bytes, deadline_s=_PREPARE_S)
    if isinstance(offer, Cannot):
        raise NotGiven(f"{link.peer} cannot give it: {offer.reason}")
    if not isinstance(offer, Offer) or offer.updates < 0:
        raise FrameError(f"{link.peer} says {type(offer).__name__} where it should offer")
    if offer.num_bytes > max_bytes:
        raise FrameError(f"{link.peer} offers {offer.num_bytes} bytes, this stage needs at most {max_bytes}")
    with path.open("wb") as file:
        _take_pieces(link, file, offer.num_bytes)
    link.send(Done(""), deadline_s=_SAY_S)
    return offer.updates


def _take_pieces(link: Link, file: IO[bytes], num_bytes: int) -> None:
    digest, memory, left_bytes = hashlib.sha256(), bytearray(_PIECE_BYTES), num_bytes
    views: list[memoryview] = []

    def place(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
        if isinstance(header, Piece) and (len(lengths) != 1 or not 0 < lengths[0] <= min(_PIECE_BYTES, left_bytes)):
            raise FrameError(f"{link.peer} sends a piece of {sum(lengths)} bytes, {left_bytes} are left")
        views[:] = [memoryview(memory)[:length] for length in lengths] if isinstance(header, Piece) else []
        return list(views)

    while not isinstance(said := link.receive(place, deadline_s=_SAY_S), Done):
        if not isinstance(said, Piece):
            raise FrameError(f"{link.peer} says {type(said).__name__} in the middle of a copy")
        digest.update(views[0])
        file.write(views[0])
        left_bytes -= len(views[0])
    if left_bytes or digest.hexdigest() != said.digest:
        raise LinkError(f"the copy from {link.peer} came {'short' if left_bytes else 'damaged'}")


def _no_bytes(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
    return []
