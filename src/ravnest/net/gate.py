"""Who is inside: something shared is freed only when the last thread that uses it has left.

Closing a socket under a thread that waits on it would let the system hand the same number to another
file. So closing is two steps: shut the gate and wake those inside, then free when the last one leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ravnest.core.errors import LinkClosed

__all__ = ["Gate"]


class Gate:
    """Used as a context by those who go in; `free` runs once, after `shut` and after the last has left."""

    def __init__(self, what: str, free: Callable[[], None]) -> None:
        self._what = what
        self._free = free
        self._lock = threading.Lock()
        self._num_inside = 0
        self._shut = False

    @property
    def is_shut(self) -> bool:
        return self._shut

    def __enter__(self) -> None:
        with self._lock:
            if self._shut:
                raise self.closed_here()
            self._num_inside += 1

    def __exit__(self, *exc: object) -> None:
        self._leave()

    def closed_here(self) -> LinkClosed:
        return LinkClosed(f"{self._what} was closed on this side")

    def shut(self, wake: Callable[[], None]) -> None:
        """Let nobody in any more and call `wake`, which makes those inside leave; acts only once."""
        with self._lock:
            if self._shut:
                return
            self._shut = True
            self._num_inside += 1  # what `wake` touches must not be freed under it
        try:
            wake()
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            last = self._shut and self._num_inside == 0
        if last:
            self._free()
