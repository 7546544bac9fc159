"""Replaces what torch.export does not record by forms that it records, with the same values and gradients.

x.data                      x.detach()
x.data = y                  x.detach().copy_(y)
torch.inference_mode()      torch.no_grad()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import inference_mode
from torch.overrides import TorchFunctionMode

__all__ = ["recorded_forms"]

_DATA: Any = Tensor.data
_NAMES: dict[Any, str] = {
    form: name
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for form in (getattr(torch, name), getattr(Tensor, name), getattr(Tensor, f"__{name}__"))
}
_COMPARISONS = tuple(_NAMES)


class _RecordedForms(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._masks: list[_Mask] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype is torch.bool:
            return func(args[0], self._first_equal(args[1]))
        if func in _COMPARISONS and not kwargs:
            result = func(*args)
            if isinstance(result, Tensor) and result.dtype is torch.bool:
                self._masks.append(_Mask(result, func, args, [*_versions(result, *args)]))
            return result
        if func == _DATA.__get__ and isinstance(args[0], Tensor):
            return args[0].detach()
        if func == _DATA.__set__ and isinstance(args[1], Tensor) and _alike(*args):
            with torch.no_grad():
                args[0].detach().copy_(args[1])
            return None
        return func(*args, **(kwargs or {}))

    def _first_equal(self, mask: Tensor) -> Tensor:
        """The first mask that was computed by the same comparison of the same tensors, if none has been written to."""
        made = next((m for m in self._masks if m.result is mask), None)
        return next((m.result for m in self._masks if made is not None and m.equals(made)), mask)


@dataclass(frozen=True)
class _Mask:
    result: Tensor
    func: Any
    args: tuple[Any, ...]
    versions: list[int]  # of the result and of the tensors that were compared

    def equals(self, other: _Mask) -> bool:
        same = [
            a is b or (not isinstance(a, Tensor) and type(a) is type(b) and a == b)
            for a, b in zip(self.args, other.args, strict=False)
        ]
        return (
            len(self.args) == len(other.args)
            and _NAMES[self.func] == _NAMES[other.func]
            and all(same)
            and self.versions[1:] == other.versions[1:]
            and all([*_versions(m.result)] == m.versions[:1] for m in (self, other))
        )


def _versions(*values: Any) -> Iterator[int]:
    return (value._version for value in values if isinstance(value, Tensor))


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
        with _RecordedForms():
            yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave
