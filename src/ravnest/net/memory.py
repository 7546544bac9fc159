"""Two links in one process: the twin of the others for tests and for stages that share a process.

The bytes go through a ring of fixed size, so a slow reader stops the writer as it does on a real link.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ravnest.core.config import require
from ravnest.net.link import LinkConfig
from ravnest.net.stream import StreamLink

__all__ = ["MemoryChannel", "memory_channels", "memory_pair"]


class _Ring:
    """Bytes one way, at most `capacity_bytes` of them at a time."""

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
        """Take what fits; nothing while that is only crumbs, so that a small frame is never cut in two."""
        wanted_bytes = sum(view.nbytes for view in views)
        with self._changed:
            if self._ended:
                raise BrokenPipeError("the other end is closed")
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

    def wait_room(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or self._free_bytes() >= self._enough_bytes(), timeout_s)

    def wait_bytes(self, timeout_s: float) -> bool:
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
    """A `Channel` over two rings, one each way."""

    def __init__(self, outgoing: _Ring, incoming: _Ring) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    def try_write(self, views: Sequence[memoryview]) -> int:
        return self._outgoing.write(views)

    def try_flush(self) -> bool:
        return True

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        return self._incoming.read(views[0])

    def wait_writable(self, timeout_s: float) -> bool:
        return self._outgoing.wait_room(timeout_s)

    def wait_readable(self, timeout_s: float) -> bool:
        return self._incoming.wait_bytes(timeout_s)

    def notice_death(self, after_s: float) -> None:
        """Nobody dies alone in one process."""

    def shutdown(self) -> None:
        self._outgoing.end()
        self._incoming.end()

    def close(self) -> None:
        """Nothing to free: the rings go with their last user."""


def memory_channels(capacity_bytes: int) -> tuple[MemoryChannel, MemoryChannel]:
    """Two ends of a pair of rings."""
    require(capacity_bytes > 0, f"a link holds at least 1 byte, not {capacity_bytes}")
    there, back = _Ring(capacity_bytes), _Ring(capacity_bytes)
    return MemoryChannel(there, back), MemoryChannel(back, there)


def memory_pair(
    config: LinkConfig, *, capacity_bytes: int = 2**20, names: tuple[str, str] = ("left", "right")
) -> tuple[StreamLink, StreamLink]:
    """Two linked ends, each of which knows the other by name."""
    left, right = memory_channels(capacity_bytes)
    return StreamLink(left, config, peer=names[1]), StreamLink(right, config, peer=names[0])
