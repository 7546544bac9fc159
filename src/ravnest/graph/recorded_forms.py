"""Replaces what torch.export does not record by forms that it records, with the same values and gradients.

x.data                      x.detach()
x.data = y                  x.detach().copy_(y)
torch.inference_mode()      torch.no_grad()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import inference_mode
from torch.overrides import TorchFunctionMode

__all__ = ["recorded_forms"]

_DATA: Any = Tensor.data


class _DetachedData(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA.__get__ and isinstance(args[0], Tensor):
            return args[0].detach()
        if func == _DATA.__set__ and isinstance(args[1], Tensor) and _alike(*args):
            with torch.no_grad():
                args[0].detach().copy_(args[1])
            return None
        return func(*args, **(kwargs or {}))


def _alike(tensor: Tensor, new: Tensor) -> bool:
    return tensor.shape == new.shape and tensor.dtype == new.dtype


@contextmanager
def recorded_forms() -> Iterator[None]:
    """Record detached data and regions without gradients."""
    kind: Any = inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def enter_without_gradients(self: Any) -> None:
        self.replaced = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)
        self.replaced.__enter__()

    def leave_without_gradients(self: Any, *error: Any) -> None:
        self.replaced.__exit__(*error)

    kind.__enter__, kind.__exit__ = enter_without_gradients, leave_without_gradients
    try:
        with _DetachedData():
            yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave
