"""Batches of the user, and the queue between the thread that iterates them and the loop that leases them to clusters.

An iterable starts over when it ends; an iterator ends the run. The first batches are read ahead, because they show
which sizes vary. A batch is copied when it is produced, since a loader may reuse its memory, and kept until it is
settled, because a cluster may lose it. The producer is at most `lead` batches ahead of the leases, which bounds the
memory.

The loss of a batch is the mean of its microbatches' losses, weighted by their samples or by the user's own weights of
the samples:

    share of a microbatch = sum of the weights of its samples / sum of the weights of the batch
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ravnest.coordinator.requester import Microbatch
from ravnest.graph import Program
from ravnest.graph.batch import flatten, unflatten
from ravnest.graph.prediction import PromptEncoder
from ravnest.pipeline.tensor_codec import TensorCodec, as_bytes

__all__ = ["BatchQueue", "Batches", "Weight", "sample_weights"]

_LOOK_AHEAD = 8  # batches

Weight = Callable[[Any], Tensor]


class Batches:
    """The user's data, at most `max_epochs` passes; `epochs` counts the finished ones.

    `examples` are the first batches, for tracing; `next` returns them too.
    """

    def __init__(self, data: Iterable[Any], max_epochs: int | None = None) -> None:
        _check_data(data, max_epochs)
        self._data, self._max_epochs = data, max_epochs
        self.epochs = 0
        self._iterator: Iterator[Any] = _noted(data)
        self.examples = self._read_ahead()

    def _read_ahead(self) -> list[Any]:
        examples: list[Any] = []
        rest = self._iterator
        for _ in range(_LOOK_AHEAD):
            try:
                examples.append(_copied(next(self._iterator)))
            except StopIteration:
                break
            except Exception as error:  # of the user's iterator: it is raised where it belongs
                if not examples:
                    raise
                rest = _raising(error)
                break
        if not examples:
            raise ValueError("the data are empty: there is no batch to train on")
        self._iterator = chain(examples, rest)
        return examples

    def next(self) -> Any | None:
        """Return the next batch, or None at the end."""
        for batch in self._iterator:
            return batch
        self.epochs += 1
        is_last = self._max_epochs is not None and self.epochs >= self._max_epochs
        if is_last or isinstance(self._data, Iterator):
            return None
        self._iterator = _noted(self._data)
        return next(self._iterator, None)

    def skip(self, count: int) -> None:
        """Skip batches that were used before: by the data's own `skip(n)`, which returns the rest, else one by one.

        For data with a length, `n` is within an epoch.
        """
        own = getattr(self._data, "skip", None)
        if callable(own):
            length = len(self._data) if isinstance(self._data, Sized) else 0
            self.epochs, left = divmod(count, length) if length else (0, count)
            self._iterator = _noted(own(left))
            return
        for passed in range(count):
            if self.next() is None:
                raise ValueError(f"the data ended after {passed} batches, but the run has already used {count}")

    def close(self) -> None:
        """Drop the iterator, which ends the worker processes of a loader unless they are persistent."""
        self._iterator = iter(())
        self.examples = []


def _check_data(data: Any, max_epochs: int | None) -> None:
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        raise ValueError(
            f"the data are a {type(data).__name__}, which gives samples one by one: pass "
            "torch.utils.data.DataLoader(dataset, batch_size=...)"
        )
    if not isinstance(data, Iterable):
        hint = "call it, and pass what it returns" if callable(data) else "pass a list or a loader of batches"
        raise ValueError(f"the data are a {type(data).__name__}, which cannot be iterated: {hint}")
    if isinstance(data, Iterator) and max_epochs is not None:
        raise ValueError(
            f"epochs is {max_epochs}, but the data are a {type(data).__name__}, which can be read once, and the "
            "run ends with them: leave out epochs, give steps, or pass a list or a loader"
        )


def _copied(batch: Any) -> Any:
    """A copy that later batches cannot change; a batch that is not valid is rejected later, where it is used."""
    try:
        structure, leaves = flatten(batch, "batch")
    except ValueError:
        return batch
    return unflatten(structure, [tensor.clone() for _, tensor in leaves])


def _noted(data: Iterable[Any]) -> Iterator[Any]:
    """The items of the user's data; an error of theirs gets a note that says so."""
    count = 0
    try:
        for batch in data:
            yield batch
            count += 1
    except Exception as error:
        error.add_note(f"The data raised this after {count} batches of a pass.")
        raise


def _raising(error: Exception) -> Iterator[Any]:
    for raised in (error,):
        raise raised
    yield


def sample_weights(program: Program, leaves: Sequence[Tensor], weight: Weight | None, samples: int) -> Tensor:
    """Return the weight of each sample in the loss of its batch; without a function, 1.

    Raises:
        ValueError: The user's function does not return a weight for each sample.
    """
    if weight is None:
        return torch.ones(samples, dtype=torch.float64)
    found = weight(program.feed.restore(leaves))
    if not isinstance(found, Tensor) or found.shape != (samples,):
        what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(
            f"the job's weight function must return a tensor of shape ({samples},), one weight a sample, got {what}"
        )
    weights = found.detach().cpu().double()
    if not bool((weights >= 0).all()) or not 0 < float(weights.sum()) < float("inf"):
        raise ValueError(
            "the weights of the samples in a batch must be finite, at least 0 and not all 0, got "
            f"{float(weights.min()):g} to {float(weights.max()):g}: leave out batches without any targets"
        )
    return weights


def split_microbatches(leaves: Sequence[Tensor], batched: Sequence[bool], count: int) -> list[list[Tensor]]:
    """Split a batch into at most `count` microbatches of about equal size; unbatched tensors go with each."""
    if not any(batched):  # a batch that cannot be split
        return [list(leaves)]
    size = next(len(t) for t, is_batched in zip(leaves, batched, strict=True) if is_batched)
    number = min(size, count)
    if number == 0:
        raise ValueError("a batch must have at least one sample, got 0")
    parts = [t.tensor_split(number) if b else [t] * number for t, b in zip(leaves, batched, strict=True)]
    return [list(part) for part in zip(*parts, strict=True)]


@dataclass(frozen=True)
class _Batch:
    leaves: list[Tensor]
    weights: Tensor  # of the samples


class BatchQueue:
    """A bounded queue: one thread offers batches, another takes them.

    `batch_size` is the size of the largest batch, `max_batch` that of its microbatches, both in samples.
    """

    def __init__(
        self, program: Program, *, batch_size: int, max_batch: int, lead: int = 4, weight: Weight | None = None
    ) -> None:
        self.max_batch, self.lead, self._batch_size, self._weight = max_batch, lead, batch_size, weight
        self._program = program
        self._codec = TensorCodec(program.inputs, "none", max_batch=max_batch)
        self._batched = [bool(v.shape) and isinstance(v.shape[0], tuple) for v in program.inputs]
        self._lock = threading.Lock()
        self._kept: dict[int, _Batch] = {}
        self._produced = self._taken = 0
        self._closed = False
        self._settled: frozenset[int] = frozenset()

    def resume(self, first: int, next_new: int, unsettled: Collection[int]) -> None:
        """Start with batch `first`; of the batches before `next_new`, only the unsettled ones are kept."""
        with self._lock:
            self._produced, self._taken = first, next_new
            self._settled = frozenset(range(first, next_new)) - set(unsettled)

    @property
    def produced(self) -> int:
        with self._lock:
            return self._produced

    @property
    def has_room(self) -> bool:
        with self._lock:
            return self._produced - self._taken < self.lead

    def offer(self, batch: Any) -> None:
        """Add a copy of a batch; raises `ValueError` if it does not match the first ones."""
        leaves = [tensor.clone() for tensor in self._program.feed(batch)]
        samples = self._samples(leaves)
        if samples == 0:
            raise ValueError("a batch must have at least one sample, got 0")
        if samples > self._batch_size:
            raise ValueError(
                f"a batch has {samples} samples, the largest of the first batches had {self._batch_size}: declare the "
                f"largest with max_batch_size={samples} (--max-batch-size {samples})"
            )
        weights = sample_weights(self._program, leaves, self._weight, samples)
        with self._lock:
            if self._produced not in self._settled:
                self._kept[self._produced] = _Batch(leaves, weights)
            self._produced += 1

    def close(self) -> None:
        """Make no further batch available: only batches that were leased before can be taken."""
        with self._lock:
            self._closed = True

    def available(self) -> int:
        with self._lock:
            return self._taken if self._closed else self._produced

    def take(self, batch: int, count: int) -> list[Microbatch]:
        """Return a batch as exactly `count` microbatches.

        Missing ones, and those whose samples all have weight 0, repeat the last of the others, with share 0.
        """
        with self._lock:
            kept = self._kept[batch]
            self._taken = max(self._taken, batch + 1)
        parts = split_microbatches(kept.leaves, self._batched, count)
        weights = [float(part.sum()) for part in kept.weights.tensor_split(len(parts))]
        repeated = next(part for part, weight in zip(reversed(parts), reversed(weights), strict=True) if weight)
        parts = [part if weight else repeated for part, weight in zip(parts, weights, strict=True)]
        missing, total = count - len(parts), sum(weights)
        shares = [weight / total for weight in weights] + [0.0] * missing
        return [
            self._microbatch(part, share) for part, share in zip([*parts, *[repeated] * missing], shares, strict=True)
        ]

    def held_out(self, batches: Sequence[Any]) -> list[Microbatch]:
        """Return held-out batches as microbatches of the size that workers expect."""
        microbatches: list[Microbatch] = []
        for batch in batches:
            leaves = self._program.feed(batch)
            parts = split_microbatches(leaves, self._batched, -(-self._samples(leaves) // self.max_batch))
            microbatches += [self._microbatch(part, 0.0) for part in parts]
        return microbatches

    def prompt(self, tokens: Sequence[int]) -> tuple[Microbatch, int]:
        """Return a prompt as a microbatch of one sample, and the position of its last token; raises `ValueError`."""
        leaves, position = PromptEncoder(self._program)(tokens)
        return self._microbatch(leaves, 0.0), position

    def settled(self, batch: int) -> None:
        with self._lock:
            self._kept.pop(batch, None)

    def _samples(self, leaves: Sequence[Tensor]) -> int:
        return next((len(t) for t, b in zip(leaves, self._batched, strict=True) if b), self._batch_size)

    def _microbatch(self, part: Sequence[Tensor], share: float) -> Microbatch:
        buffers = [as_bytes(t) for t in self._codec.pack(part)]
        return Microbatch(self._samples(part), share, buffers, self._codec.sizes(part))
