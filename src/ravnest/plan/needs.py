"""The memory of every stage of a chain there can be, remembered: it is asked for again and again.

Of a stage's memory only its link buffers, and its inputs if it recomputes, depend on where exactly it is cut; the rest
only grows with the stage. So the rest is kept apart:

    total(i, k) = bare(i, k) + link buffers * bytes over both cuts (+ depth * inputs)
"""

from __future__ import annotations

from functools import lru_cache

from .chain import Places
from .memory import MemoryModel, stage_memory

__all__ = ["Needs", "needs_of"]


class Needs:
    """Bytes of stages between places, with so many microbatches in flight."""

    def __init__(self, places: Places, model: MemoryModel) -> None:
        chain, self.places, self.model = places.chain, places, model
        self.link_bytes = [model.link_buffers * chain.cut_bytes(b) for b in places.bounds]
        self.input_bytes = [chain.forward_bytes[b] if model.recompute else 0 for b in places.bounds]
        self._bare: dict[tuple[int, int, int], int] = {}

    def bare(self, i: int, k: int, depth: int) -> int:
        """Without link buffers and inputs: never less for a longer stage."""
        known = self._bare.get((i, k, depth))
        if known is None:
            share = self.places.share(i, k)._replace(input_bytes=0, link_bytes=0)
            known = self._bare[i, k, depth] = stage_memory(share, depth, self.model).total
        return known

    def total(self, i: int, k: int, depth: int) -> int:
        bare = self.bare(i, k, depth)
        return bare + self.link_bytes[i] + self.link_bytes[k] + depth * self.input_bytes[i]


@lru_cache(maxsize=16)
def needs_of(places: Places, model: MemoryModel) -> Needs:
    """The one table for these; the last few are kept."""
    return Needs(places, model)
