"""Tensors in files instead of memory: for a model that is too big for this machine's memory.

The system writes their pages to the disk when memory is short and reads them when they are used. The files have no name
and vanish with their tensors.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["TensorFiles"]

_MIN_BYTES = 1 << 20  # smaller tensors stay in memory


class TensorFiles(TorchDispatchMode):
    """While active, keeps large results of operations in files of `folder`."""

    def __init__(self, folder: Path, min_bytes: int = _MIN_BYTES) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder
        self._min_bytes = min_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        return tree_map_only(Tensor, lambda x: x if _memory(x) in given else self.stored(x), result)

    def stored(self, tensor: Tensor) -> Tensor:
        """The same values in a file, in the same order, if the tensor is large."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or type(tensor) is not Tensor:
            return tensor
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes < self._min_bytes:
            return tensor
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.truncate(num_bytes)
            pages = mmap.mmap(file.fileno(), num_bytes)
        with torch.no_grad():
            whole = torch.frombuffer(pages, dtype=tensor.dtype)
            stored = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            stored.copy_(tensor)
        return stored

    @contextmanager
    def gradients_of(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Move the gradient of each tensor into a file as soon as it is computed."""
        handles = [
            tensor.register_post_accumulate_grad_hook(self._move_gradient)  # type: ignore[no-untyped-call]
            for tensor in tensors
            if tensor.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _move_gradient(self, tensor: Tensor) -> None:
        if tensor.grad is not None:
            tensor.grad = self.stored(tensor.grad)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
