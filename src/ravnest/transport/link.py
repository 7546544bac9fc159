"""The link interface: whole messages, in order, in both directions, between two stages.

Every wait has a deadline. Received bytes go straight into memory that the receiver chose. A link that failed in the
middle of a frame is closed, because the start of the next frame is unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from ravnest.core.config import config, require
from ravnest.transport.frame import MAX_GENERATION

__all__ = ["Flow", "Link", "LinkConfig", "LinkStats", "Place"]

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


Place: TypeAlias = Callable[[msgspec.Struct, tuple[int, ...]], Sequence[memoryview]]
"""Maps a header and the lengths of its buffers to writable memory of exactly these lengths.

Raising `FrameError`, or returning memory of other lengths, rejects the frame.
"""


@config
class LinkConfig:
    """Messages and limits of a link.

    `headers` is a msgspec struct or a tagged union of structs. `dead_after_s` closes the link when the peer's machine
    has not responded for that long, where the operating system supports it.
    """

    headers: Any
    generation: int = 0
    max_frame_bytes: int = 2**32
    dead_after_s: float | None = None

    def __post_init__(self) -> None:
        require(
            0 <= self.generation <= MAX_GENERATION,
            f"generation must be between 0 and {MAX_GENERATION}, got {self.generation}",
        )
        require(self.max_frame_bytes >= 0, f"max_frame_bytes must be >= 0, got {self.max_frame_bytes}")
        require(
            self.dead_after_s is None or self.dead_after_s >= 1, f"dead_after_s must be >= 1, got {self.dead_after_s}"
        )


@dataclasses.dataclass
class Flow:
    """Traffic in one direction: whole frames, their bytes, and the time that the calling thread was blocked."""

    frames: int = 0
    num_bytes: int = 0
    blocked_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class LinkStats:
    """Snapshot of the traffic in both directions."""

    sent: Flow
    received: Flow


class Link(Protocol):
    """One end of a link. One thread may send while another receives; a third may close.

    `LinkTimeout` before the first byte of a frame leaves the link usable; every other failure of a transfer closes it.
    """

    generation: int
    """Generation of the plan; frames of any other generation are rejected."""

    @property
    def peer(self) -> str:
        """Name of the other end; authenticated if the link is over TLS."""

    @property
    def closed(self) -> bool: ...

    @property
    def stats(self) -> LinkStats: ...

    def send(self, header: msgspec.Struct, buffers: Sequence[ReadableBuffer] = (), *, deadline_s: float) -> None:
        """Send one message; the buffers may be reused after this returns."""

    def receive(self, place: Place, *, deadline_s: float) -> msgspec.Struct:
        """Wait up to `deadline_s` for a message to begin and as long again for it to end; return its header."""

    def close(self) -> None:
        """Close now, from any thread; calls in progress raise `LinkClosed`."""
