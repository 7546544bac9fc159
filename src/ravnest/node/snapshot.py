"""A stage's tensors as flat float32 vectors, one for each ring, and the way back.

Tensors of any type are averaged as float32. A whole number (how many batches a batch norm has seen) is rounded when it
moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import RavnestError
from ..core.orders import Seat

__all__ = ["Floats", "flatten", "unflatten"]

Floats = NDArray[np.float32]


def flatten(seats: Sequence[Seat], tensors: Mapping[str, Tensor]) -> dict[int, Floats]:
    """A copy of what each ring averages."""
    vectors: dict[int, Floats] = {}
    for seat in seats:
        missing = [name for name in seat.targets if name not in tensors]
        if missing:
            raise RavnestError(f"ring {seat.ring} averages {missing[0]}, which this stage does not own")
        vector = np.empty(sum(tensors[name].numel() for name in seat.targets), np.float32)
        for name, lo, hi in _places(seat, tensors):
            torch.from_numpy(vector[lo:hi]).copy_(tensors[name].detach().reshape(-1))
        vectors[seat.ring] = vector
    return vectors


def unflatten(seats: Sequence[Seat], vectors: Mapping[int, Floats], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vectors as tensors of these shapes, without copying."""
    return {
        name: torch.from_numpy(vectors[seat.ring][lo:hi]).view(tensors[name].shape)
        for seat in seats
        for name, lo, hi in _places(seat, tensors)
    }


def _places(seat: Seat, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
    end = 0
    for name in seat.targets:
        start, end = end, end + tensors[name].numel()
        yield name, start, end
