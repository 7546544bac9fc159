"""Lazy modules, whose sizes are known at their first forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["has_lazy", "replaced_lazy", "uninitialised_outside_modes"]

_Uninitialized: Any = UninitializedParameter.__mro__[1]  # the class that both have in common


def has_lazy(module: nn.Module) -> bool:
    """Whether a parameter or buffer of the module has no size yet."""
    return any(nn.parameter.is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


@contextmanager
def uninitialised_outside_modes() -> Iterator[None]:
    """Make uninitialised parameters outside fake tensors, which cannot become a subclass of another tensor."""
    originals = {kind: kind.__new__ for kind in (UninitializedParameter, UninitializedBuffer)}

    def replaced(original: Any) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return original(*args, **options)

        return make

    for kind, original in originals.items():
        kind.__new__ = replaced(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__new__ = original  # type: ignore[method-assign]


@contextmanager
def replaced_lazy(module: nn.Module) -> Iterator[None]:
    """Replace the uninitialised tensors of a module, instead of changing them, when they get their sizes."""
    original = _Uninitialized.materialize

    def materialize(lazy: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        tensor = torch.empty(shape, dtype=dtype or lazy.dtype)
        made = nn.Parameter(tensor, lazy.requires_grad) if isinstance(lazy, UninitializedParameter) else tensor
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, known in tensors.items():
                    if known is lazy:
                        tensors[name] = made  # type: ignore[assignment]

    _Uninitialized.materialize = materialize
    try:
        yield
    finally:
        _Uninitialized.materialize = original
