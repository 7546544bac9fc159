"""Links within one process, for tests.

The bytes go through a ring buffer of fixed size, so a slow reader stops the writer as on a real link.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ravnest.core.config import require
from ravnest.transport.link import LinkConfig
from ravnest.transport.stream import StreamLink

__all__ = ["MemoryChannel", "memory_channels", "memory_pair"]


class _Ring:
    """Ring buffer of one direction, for at most `capacity_bytes`."""

    def __init__(self, capacity_bytes: int) -> None:
        self._memory = memoryview(bytearray(capacity_bytes))
        self._start = 0
        self._num_bytes = 0
        self._ended = False
        self._changed = threading.Condition()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def write(self, views: Sequence[memoryview]) -> int:
        """Take what fits; nothing while less than a quarter is free, so that a small frame is never split."""
        wanted_bytes = sum(view.nbytes for view in views)
        with self._changed:
            if self._ended:
                raise BrokenPipeError("other end is closed")
            if self._free_bytes() < min(wanted_bytes, self._enough_bytes()):
                return 0
            taken_bytes = sum(self._copy_in(view[: self._free_bytes()]) for view in views)
            self._changed.notify_all()
            return taken_bytes

    def read(self, view: memoryview) -> int | None:
        with self._changed:
            if not self._num_bytes:
                return 0 if self._ended else None
            got_bytes = self._copy_out(view[: self._num_bytes])
            self._changed.notify_all()
            return got_bytes

    def wait_writable(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self._free_bytes() >= self._enough_bytes(), timeout_s)

    def wait_readable(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self._num_bytes > 0, timeout_s)

    def _enough_bytes(self) -> int:
        return max(1, self._memory.nbytes // 4)

    def _free_bytes(self) -> int:
        return self._memory.nbytes - self._num_bytes

    def _copy_in(self, view: memoryview) -> int:
        at = (self._start + self._num_bytes) % self._memory.nbytes
        first = min(view.nbytes, self._memory.nbytes - at)
        self._memory[at : at + first] = view[:first]
        self._memory[: view.nbytes - first] = view[first:]
        self._num_bytes += view.nbytes
        return view.nbytes

    def _copy_out(self, view: memoryview) -> int:
        first = min(view.nbytes, self._memory.nbytes - self._start)
        view[:first] = self._memory[self._start : self._start + first]
        view[first:] = self._memory[: view.nbytes - first]
        self._start = (self._start + view.nbytes) % self._memory.nbytes
        self._num_bytes -= view.nbytes
        return view.nbytes


class MemoryChannel:
    """A `Channel` over two ring buffers, one per direction."""

    def __init__(self, outgoing: _Ring, incoming: _Ring) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    def try_write(self, views: Sequence[memoryview]) -> int:
        return self._outgoing.write(views)

    def try_flush(self) -> bool:
        return True

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        return self._incoming.read(views[0])

    def wait_writable(self, timeout_s: float) -> bool:
        return self._outgoing.wait_writable(timeout_s)

    def wait_readable(self, timeout_s: float) -> bool:
        return self._incoming.wait_readable(timeout_s)

    def detect_dead_peer(self, after_s: float) -> None:
        """Both ends are in one process."""

    def shutdown(self) -> None:
        self._outgoing.end()
        self._incoming.end()

    def close(self) -> None:
        """Nothing to free."""


def memory_channels(capacity_bytes: int) -> tuple[MemoryChannel, MemoryChannel]:
    """Create both ends of a pair of ring buffers."""
    require(capacity_bytes > 0, f"capacity_bytes must be > 0, got {capacity_bytes}")
    forward, backward = _Ring(capacity_bytes), _Ring(capacity_bytes)
    return MemoryChannel(forward, backward), MemoryChannel(backward, forward)


def memory_pair(
    config: LinkConfig, *, capacity_bytes: int = 2**20, names: tuple[str, str] = ("left", "right")
) -> tuple[StreamLink, StreamLink]:
    """Create both ends of a link."""
    left, right = memory_channels(capacity_bytes)
    return StreamLink(left, config, peer=names[1]), StreamLink(right, config, peer=names[0])
