"""The user's batches, without end: an iterable is begun again when it is through, an iterator ends the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

__all__ = ["Batches", "pieces"]


class Batches:
    """`first` is there to trace with, and is given out again. `epochs` counts how often the data were begun anew."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self.epochs = 0
        self._iterator: Iterator[Any] = iter(data)
        try:
            self.first = next(self._iterator)
        except StopIteration:
            raise ValueError("the data are empty: there is no batch to train on") from None
        self._iterator = chain([self.first], self._iterator)

    def next(self) -> Any | None:
        """The next batch, or None if there are no more."""
        for batch in self._iterator:
            return batch
        self._iterator = iter(self._data)
        self.epochs += 1
        return next(self._iterator, None)


def pieces(leaves: Sequence[Tensor], batched: Sequence[bool], count: int) -> list[list[Tensor]]:
    """A batch in at most `count` microbatches of about equal size; what has no batch dimension goes with each."""
    size = next(len(t) for t, is_batched in zip(leaves, batched, strict=True) if is_batched)
    number = min(size, count)
    if number == 0:
        raise ValueError("a batch has no samples")
    parts = [t.tensor_split(number) if b else [t] * number for t, b in zip(leaves, batched, strict=True)]
    return [list(part) for part in zip(*parts, strict=True)]
