"""Checks by `assert`, in a module whose assertions pytest does not rewrite."""

from __future__ import annotations

import torch
from torch import Tensor


def asserts(x: Tensor) -> Tensor:
    assert (x < 1e9).all(), "too large"
    assert not (x > 1e9).any()
    torch._assert((x < 1e9).all(), "too large")  # type: ignore[no-untyped-call]
    return x
