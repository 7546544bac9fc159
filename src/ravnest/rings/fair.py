"""Whose turn it is on a shared line: of all rings with something to send, the one that has had the fewest bytes.

A ring that had nothing to send for a while goes on from where the others are: it is not owed what it did not use.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue for each ring, in order within it, in turns by bytes between them."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[tuple[int, T]]] = {}
        self._had_bytes: dict[int, int] = {}
        self._turn_bytes = 0  # what the ring had had that was last in turn

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def put(self, ring: int, item: T, num_bytes: int) -> None:
        if ring not in self._queues:
            self._queues[ring] = deque()
            self._had_bytes[ring] = max(self._had_bytes.get(ring, 0), self._turn_bytes)
        self._queues[ring].append((num_bytes, item))

    def take(self) -> T | None:
        """The next item, if there is one; among equals of the ring with the lowest number."""
        if not self._queues:
            return None
        ring = min(self._queues, key=lambda r: (self._had_bytes[r], r))
        self._turn_bytes = self._had_bytes[ring]
        num_bytes, item = self._queues[ring].popleft()
        self._had_bytes[ring] += num_bytes
        if not self._queues[ring]:
            del self._queues[ring]
        return item
