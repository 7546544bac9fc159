"""What a model keeps outside its parameters and buffers, as text: attributes, variables of its functions, generators.

A traced program repeats one forward pass. A model that counts its calls, or draws from a generator of its own, changes
from one forward pass to the next, although the loss may show it only after a thousand steps. A cache is the same after
the second pass as after the first.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["python_state"]

_MAX_PARTS = 200_000
_MAX_ITEMS = 1000  # of a container
_MAX_DEPTH = 8
_MAX_BYTES = 1 << 22  # of a tensor or an array
_OF_MODULES = ("_parameters", "_buffers", "_non_persistent_buffers_set", "training")
_LIBRARIES = (
    "torch",
    "transformers",
    "numpy",
    "peft",
    "timm",
    "torchvision",
    "ravnest",
    "pytest",
    "_pytest",
)  # their functions keep caches, no state of a model


def python_state(module: nn.Module) -> dict[str, str]:
    """The state of a module by its place in it."""
    reader = _Reader()
    for name, part in module.named_modules():
        reader.add(name or "the job", part, 0)
        for key, tensor in part._parameters.items():
            if tensor is not None and tensor._backward_hooks:
                reader.add(f"{name}.{key}, its hooks", dict(tensor._backward_hooks), 1)
    return reader.found


class _Reader:
    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._seen: dict[int, Any] = {}  # keeps what it has seen alive, so that no number is used twice

    def add(self, path: str, value: Any, depth: int) -> None:
        """Add a value and what it consists of."""
        if (text := _text(value)) is not None:
            self.found.setdefault(path, text)  # an attribute hides that of its class
            return
        if depth > _MAX_DEPTH or id(value) in self._seen or len(self._seen) > _MAX_PARTS:
            return
        self._seen[id(value)] = value
        for key, part in _parts(value):
            self.add(f"{path}{key}", part, depth + 1)


def _text(value: Any) -> str | None:
    """A value without parts as text; None for any other."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | itertools.count):
        return repr(value)
    if isinstance(value, Tensor):
        return "" if isinstance(value, nn.Parameter) else _digest_of_tensor(value)
    if isinstance(value, np.ndarray):
        return _digest(value.tobytes()) if value.nbytes <= _MAX_BYTES and value.dtype != object else ""
    if type(value) is random.Random:
        return _digest(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return _digest(repr(value.bit_generator.state).encode())
    if isinstance(value, np.random.RandomState):
        return _digest(repr([np.asarray(part).tobytes() for part in value.get_state()]).encode())
    if isinstance(value, torch.Generator):
        return _digest(value.get_state().numpy().tobytes())
    return None


def _digest(data: bytes) -> str:
    return "another value" if not data else hashlib.sha256(data).hexdigest()[:12]


def _digest_of_tensor(tensor: Tensor) -> str:
    """The values of a tensor that is no buffer; nothing if it is large, or has none."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_plain or tensor.is_quantized or tensor.nbytes > _MAX_BYTES:
        return ""
    return _digest(bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b"")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value consists of, with the way to it."""
    if isinstance(value, dict):
        yield "", len(value)
        items = itertools.islice(dict.items(value), _MAX_ITEMS)
        yield from ((f"[{key!r:.40}]" if isinstance(key, str | int) else "[...]", part) for key, part in items)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield "", len(value)
        if not isinstance(value, set | frozenset):
            yield from ((f"[{i}]", part) for i, part in enumerate(itertools.islice(value, _MAX_ITEMS)))
    elif isinstance(value, FunctionType):
        yield from _variables(value)
    elif isinstance(value, MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, nn.Module):
        yield from ((f".{k}", part) for k, part in vars(value).items() if k not in (*_OF_MODULES, "_modules"))
        yield from _of_class(type(value))
    elif isinstance(value, SimpleNamespace) or (_has_attributes(value) and not _is_library(type(value))):
        yield from ((f".{key}", part) for key, part in vars(value).items())
        yield from _of_class(type(value))


def _has_attributes(value: Any) -> bool:
    return "__dict__" in dir(type(value)) and not isinstance(value, type | ModuleType)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Class attributes and methods of the user's own classes."""
    for owner in kind.__mro__[:-1]:
        if not _is_library(owner):
            yield from ((f".{key}", part) for key, part in vars(owner).items() if not key.startswith("__"))


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables outside a function that it uses: of the functions around it, and global ones."""
    if _is_library(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if isinstance(cell, CellType) and _is_filled(cell):
            yield f" (variable {name})", cell.cell_contents
    yield from ((f" (default {i})", part) for i, part in enumerate(function.__defaults__ or ()))
    for name in function.__code__.co_names:
        given = function.__globals__.get(name)
        if given is not None and not isinstance(given, type | ModuleType):
            yield f" (global variable {name})", given


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_library(owned: Any) -> bool:
    package = str(getattr(owned, "__module__", None)).partition(".")[0]
    return package in _LIBRARIES or (package in sys.stdlib_module_names and package != "__main__")
