"""The user's batches, without end: an iterable is begun again when it is through, an iterator ends the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain
from typing import Any

from torch import Tensor

from .graph import Program

__all__ = ["Batches", "Microbatches", "pieces"]


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

    def skip(self, count: int) -> None:
        """Pass over batches that were used before: by the data's own `skip(n)`, which gives what follows, else one by
        one. With a length, `n` is within an epoch.
        """
        own = getattr(self._data, "skip", None)
        if callable(own):
            length = len(self._data) if isinstance(self._data, Sized) else 0
            self.epochs, left = divmod(count, length) if length else (0, count)
            self._iterator = iter(own(left))
            return
        for passed in range(count):
            if self.next() is None:
                raise ValueError(f"the data ended after {passed} batches, and {count} had been used before")


class Microbatches:
    """Batches in microbatches that workers expect: `accumulate` of them, none larger than `max_batch` samples."""

    def __init__(self, program: Program, accumulate: int, max_batch: int) -> None:
        self._program, self.accumulate, self.max_batch = program, accumulate, max_batch
        self._batched = [bool(v.shape) and isinstance(v.shape[0], tuple) for v in program.inputs]

    def size(self, leaves: Sequence[Tensor]) -> int:
        """How many samples there are."""
        return len(next(t for t, is_batched in zip(leaves, self._batched, strict=True) if is_batched))

    def of(self, batch: Any) -> list[tuple[list[Tensor], float]]:
        """A window: microbatches with their shares of it.

        One with fewer samples than microbatches is filled up with the last, at no weight.
        """
        parts = pieces(self._program.feed(batch), self._batched, self.accumulate)
        sizes = [self.size(part) for part in parts]
        if max(sizes) > self.max_batch:
            raise ValueError(
                f"a batch has microbatches of {max(sizes)} samples, the first had {self.max_batch}: "
                "no batch may be larger than the first"
            )
        missing = self.accumulate - len(parts)
        shares = [size / sum(sizes) for size in sizes] + [0.0] * missing
        return list(zip([*parts, *[parts[-1]] * missing], shares, strict=True))

    def held_out(self, batch: Any) -> list[list[Tensor]]:
        """As few as may be."""
        leaves = self._program.feed(batch)
        return pieces(leaves, self._batched, -(-self.size(leaves) // self.max_batch))


def pieces(leaves: Sequence[Tensor], batched: Sequence[bool], count: int) -> list[list[Tensor]]:
    """A batch in at most `count` microbatches of about equal size; what has no batch dimension goes with each."""
    size = next(len(t) for t, is_batched in zip(leaves, batched, strict=True) if is_batched)
    number = min(size, count)
    if number == 0:
        raise ValueError("a batch has no samples")
    parts = [t.tensor_split(number) if b else [t] * number for t, b in zip(leaves, batched, strict=True)]
    return [list(part) for part in zip(*parts, strict=True)]
