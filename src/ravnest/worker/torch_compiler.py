"""Defers the import of torch's compiler, which a worker does not use: it takes 0.8 s and 36 MB.

torch's optimizers import `torch._dynamo` only to exclude themselves from compilation. A placeholder provides the two
functions that they call; any other use imports the real module and replaces the placeholder.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

__all__ = ["defer_compiler"]

_NAME = "torch._dynamo"


class _Placeholder(ModuleType):
    @staticmethod
    def disable(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return function  # nothing is compiled, so nothing has to be excluded

    @staticmethod
    def graph_break(*args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)  # sets `torch._dynamo` too


def defer_compiler() -> None:
    """Import the compiler only when something in this process needs more of it than its absence."""
    if _NAME not in sys.modules:
        placeholder = _Placeholder(_NAME)
        sys.modules[_NAME] = placeholder
        torch._dynamo = placeholder
