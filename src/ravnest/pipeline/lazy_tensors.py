"""Named tensors that are computed when they are read, so that they need no memory before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ravnest.pipeline.packing import chunks

__all__ = ["LazyTensor", "LazyTensors", "added"]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose flat elements from `lo` to `hi` are computed by `read(lo, hi)`; `lo` is a multiple of 256."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    device: torch.device

    def parts(self) -> Iterator[Tensor]:
        """The flat elements, one part after the other."""
        return (self.read(lo, hi) for lo, hi in chunks(self.shape.numel()))

    def made(self) -> Tensor:
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for (lo, hi), part in zip(chunks(result.numel()), self.parts(), strict=True):
            result.view(-1)[lo:hi] = part
        return result


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name: given ones, and those that are computed at each access."""

    def __init__(self, items: Mapping[str, Tensor | LazyTensor]) -> None:
        self._items = items

    def __getitem__(self, name: str) -> Tensor:
        item = self._items[name]
        return item.made() if isinstance(item, LazyTensor) else item

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    @staticmethod
    def items_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor | LazyTensor]:
        """The tensors of any mapping, without computing the lazy ones."""
        return tensors._items if isinstance(tensors, LazyTensors) else tensors


def added(item: Tensor | LazyTensor, by: Tensor) -> LazyTensor:
    """The sum of an item and a tensor of its shape."""
    flat = by.reshape(-1)

    def read(lo: int, hi: int) -> Tensor:
        part = item.read(lo, hi) if isinstance(item, LazyTensor) else item.detach().reshape(-1)[lo:hi]
        return part + flat[lo:hi]

    return LazyTensor(item.shape, item.dtype, read, item.device)
