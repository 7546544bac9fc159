"""Checks of the user's model before it is traced, and the place to compare it with its program."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from ravnest.core.units import format_bytes
from ravnest.graph import Program
from ravnest.profiling.host import host_memory
from ravnest.run.metrics import ProgressView

__all__ = ["CannotVerify", "check_model", "progress_messages", "verification_folder"]

_EVERY_S = 10.0
_TENSORS_IN_MEMORY = 6  # of the largest size, while weights and gradients are in files


class CannotVerify(Exception):
    """This machine has too little memory and disk to compare the model with its program."""


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


def verification_folder(program: Program, run_dir: Path | str | None) -> Path | None:
    """Return the directory for the tensors of a verification, near the run's own; None if they fit in memory.

    Raises:
        CannotVerify: if they fit neither in memory nor on the disk.
    """
    needed_bytes, usable_bytes = _verification_bytes(program), host_memory().usable_bytes
    if needed_bytes <= usable_bytes:
        return None
    path = Path(run_dir or "runs").absolute()
    folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
    text = (
        f"comparing the traced program with the model needs {format_bytes(needed_bytes)}, "
        f"{format_bytes(usable_bytes)} of memory are free"
    )
    if program.init_log is None:
        raise CannotVerify(f"{text}; with a function that builds the model, the comparison can use the disk")
    if _file_system(folder) in ("tmpfs", "ramfs"):
        raise CannotVerify(f"{text}, and {folder} is in memory too: choose a directory on a disk with --run-dir")
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise CannotVerify(f"{text} and {format_bytes(free_bytes)} on the disk of {folder}")
    largest_bytes = max(item.num_bytes for item in (*program.state, *program.idle))
    if _TENSORS_IN_MEMORY * largest_bytes > usable_bytes:
        raise CannotVerify(f"{text}; with tensors on the disk, {format_bytes(_TENSORS_IN_MEMORY * largest_bytes)}")
    return folder


def _verification_bytes(program: Program) -> int:
    """Bytes that a verification adds: the model and the program's state, if it does not share it, and two gradients."""
    state_bytes = sum(item.num_bytes for item in (*program.state, *program.idle))
    trained_bytes = sum(item.num_bytes for item in program.state if item.trainable)
    copies = 0 if program.init_log is None else 2 if program.is_self_initialising else 1
    return copies * state_bytes + 2 * trained_bytes


def _file_system(folder: Path) -> str:
    """The kind of file system that a directory is in."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (folder.resolve(), *folder.resolve().parents) if parent in mounts), "")


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
