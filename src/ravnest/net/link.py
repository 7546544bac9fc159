"""A link: whole messages, in order, both ways, between two stages; how they travel is hidden behind it.

Every wait has a deadline. Received bytes go straight into memory that the receiver chose. A link that
failed in the middle of a frame is closed, because nobody could say where the next frame begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from ravnest.core.config import config, require
from ravnest.net.frame import MAX_GENERATION

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Flow", "Link", "LinkConfig", "LinkStats", "Place"]

Place: TypeAlias = Callable[[msgspec.Struct, tuple[int, ...]], Sequence[memoryview]]
"""Given a header and the lengths of its buffers, returns writable memory for exactly what is expected.

It raises `FrameError` to refuse the frame. Returning memory of other lengths refuses it too.
"""


@config
class LinkConfig:
    """What a link carries. `headers` is a msgspec struct or a tagged union of structs.

    `dead_after_s`: a peer whose machine answers nothing for so long is dead, where the system can tell.
    """

    headers: Any
    generation: int = 0
    max_frame_bytes: int = 2**32
    dead_after_s: float | None = None

    def __post_init__(self) -> None:
        require(0 <= self.generation <= MAX_GENERATION, f"generation {self.generation} does not fit in 32 bits")
        require(self.max_frame_bytes >= 0, "max_frame_bytes is a number of bytes, 0 or more")
        require(self.dead_after_s is None or self.dead_after_s >= 1, "dead_after_s is at least a second")


@dataclasses.dataclass
class Flow:
    """What went one way: whole frames, their bytes, and how long the calling thread stood still for them."""

    frames: int = 0
    num_bytes: int = 0
    blocked_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class LinkStats:
    """Both ways of a link, as they were when asked."""

    sent: Flow
    received: Flow


class Link(Protocol):
    """One end of a link. One thread may send while another receives; a third may close.

    `LinkTimeout` before the first byte of a frame leaves the link usable; every other failure of a
    transfer closes it.
    """

    generation: int
    """Of the plan; a frame of any other is refused."""

    @property
    def peer(self) -> str:
        """Who is at the other end; proven where the link is over TLS."""

    @property
    def closed(self) -> bool: ...

    @property
    def stats(self) -> LinkStats: ...

    def send(self, header: msgspec.Struct, buffers: Sequence[ReadableBuffer] = (), *, deadline_s: float) -> None:
        """Send one message; when this returns, the buffers may be reused."""

    def receive(self, place: Place, *, deadline_s: float) -> msgspec.Struct:
        """Wait `deadline_s` for a message to begin and as long again for it to end; return its header."""

    def close(self) -> None:
        """Close now, from any thread; whoever is sending or receiving gets `LinkClosed`."""
