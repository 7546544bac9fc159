"""Checks of the user's model before it is traced: one model, on the CPU, with finite weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ravnest.run.metrics import ProgressView

__all__ = ["check_model", "progress_messages"]

_EVERY_S = 10.0


def check_model(model: Any) -> None:
    """Raise `ValueError` if the model cannot be trained as it is; a function that builds one is not called."""
    if isinstance(model, list | tuple | Mapping):
        raise ValueError(
            f"the model is a {type(model).__name__}, and a job trains one model: put several into one torch.nn.Module, "
            "or make a job of each"
        )
    if not isinstance(model, nn.Module):
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            continue
        if tensor.is_meta:
            raise ValueError(
                f"{name} of the model is on the meta device and has no values: pass the function that builds it"
            )
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} of the model is on {tensor.device}: pass model.cpu(), workers choose their own device"
            )
    for name, parameter in model.named_parameters():
        if not nn.parameter.is_lazy(parameter) and not bool(torch.isfinite(parameter.detach()).all()):
            raise ValueError(
                f"the parameter {name} of the model has values that are infinite or NaN: load or initialize it again"
            )


@contextmanager
def progress_messages(view: ProgressView, text: str, every_s: float = _EVERY_S) -> Iterator[None]:
    """Show the elapsed time while the body runs for long."""
    done = threading.Event()

    def show() -> None:
        elapsed_s = every_s
        while not done.wait(every_s):
            view.message(f"{text}, {elapsed_s:.0f} s")
            elapsed_s += every_s

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
