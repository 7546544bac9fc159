"""Keeps torch.export from printing the graph of a model that it cannot export: the error says what the user needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.export._trace

__all__ = ["quiet_export"]

_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export._trace", "torch._export.non_strict_utils")


@contextmanager
def quiet_export() -> Iterator[None]:
    """Drop what torch.export prints and logs about failures; what the model itself prints stays."""
    module: Any = torch.export._trace
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    module.print = _nothing
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        del module.print
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _nothing(*args: object, **options: object) -> None:
    """Print nothing."""
