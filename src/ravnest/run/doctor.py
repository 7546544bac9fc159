"""Checks of this PC for `ravnest doctor`: each returns findings in sentences, with a remedy where something is wrong.

Checks measure, and pure functions judge what was measured. Torch is imported by the checks that need it, so that a
broken installation is a finding too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ravnest.core.units import format_bytes, format_rate, format_seconds

__all__ = [
    "Finding",
    "check_clock",
    "check_computing",
    "check_disk",
    "check_limits",
    "check_port",
    "check_python",
    "check_training",
    "judge_line",
    "judge_memory",
    "judge_nat",
    "judge_skew",
]

State = Literal["ok", "warning", "problem"]

_MIN_PYTHON = (3, 11)
_MIN_MEMORY_BYTES, _SMALL_MEMORY_BYTES = 400_000_000, 1_500_000_000
_MIN_DISK_BYTES, _SMALL_DISK_BYTES = 100_000_000, 2_000_000_000
_WRITTEN_BYTES = 4_000_000
_MIN_FILES = 512
_MIN_SHARED_BYTES = 64_000_000
_BUILT_S = 1_735_689_600  # 2025: a clock before it was never set
_MAX_SKEW_S, _NOTED_SKEW_S = 300.0, 10.0
_SLOW_LINE_BYTES_PER_S = 125_000  # 1 Mbit/s
_SLOW_LATENCY_S = 0.25
_TRAINING_S = 60.0
_TRAINING_STEPS = 20


@dataclass(frozen=True)
class Finding:
    """The result of a check: a sentence, and what to do if the state is not ok."""

    name: str
    state: State
    text: str
    remedy: str = ""


def check_python() -> Iterator[Finding]:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < _MIN_PYTHON:
        yield Finding("python", "problem", found, "Ravnest needs Python 3.11 or newer: install one and set it up again")
    else:
        yield Finding("python", "ok", found)


def check_computing() -> Iterator[Finding]:
    """Check torch, the device and the memory, with a real gradient."""
    try:
        import torch

        weights = torch.ones(8, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad((weights @ weights).sum(), weights)
        is_right = bool((gradient == 16).all())
    except Exception as error:  # a broken installation raises anything
        yield Finding(
            "torch", "problem", f"torch cannot be used: {type(error).__name__}: {error}",
            "set the environment up again, with the versions in constraints.txt",
        )  # fmt: skip
        return
    if not is_right:
        yield Finding("torch", "problem", f"torch {torch.__version__} computes a wrong gradient", "install it again")
    elif not torch.__version__.startswith("2.13."):
        remedy = "install a version from 2.13 on and below 2.14: programs of others differ"
        yield Finding("torch", "problem", f"torch {torch.__version__} is not the version that is tested", remedy)
    else:
        yield Finding("torch", "ok", f"torch {torch.__version__} computes gradients")
    from ravnest.graph.device import available_devices, device_name
    from ravnest.profiling.host import host_limits, host_memory, usable_cores

    accelerators = [f"{each} ({device_name(each)})" for each in available_devices()[:-1]]
    cores, limits = usable_cores(), host_limits()
    limited = f", limited by a container to {limits.cores:g}" if limits.cores is not None else ""
    yield Finding("device", "ok", f"{', '.join(accelerators) or 'no accelerator'}; {cores:g} processor cores{limited}")
    memory = host_memory()
    yield judge_memory(memory.usable_bytes, memory.total_bytes)


def judge_memory(usable_bytes: int, total_bytes: int) -> Finding:
    text = f"{format_bytes(usable_bytes)} of {format_bytes(total_bytes)} can be used"
    if usable_bytes < _MIN_MEMORY_BYTES:
        remedy = f"close other programs: a worker needs {format_bytes(_MIN_MEMORY_BYTES)} before it holds any weights"
        return Finding("memory", "problem", text, remedy)
    if usable_bytes < _SMALL_MEMORY_BYTES:
        return Finding("memory", "warning", text, "close other programs, or expect a small share of a model")
    return Finding("memory", "ok", text)


def check_disk(directory: Path, purpose: str) -> Finding:
    """Write a file below a directory, which need not exist yet."""
    name = f"disk for {purpose}"
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    try:
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(existing))
        free_bytes = shutil.disk_usage(existing).free
        began = time.perf_counter()
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".ravnest-doctor-") as file:
            file.write(os.urandom(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "change its permissions"
        return Finding(
            name, "problem", f"cannot write to {directory}: {error.strerror or error}",
            f"{remedy}, or choose another directory with --run-dir (train) or --data-dir (join)",
        )  # fmt: skip
    text = f"{directory}: {format_bytes(free_bytes)} free, {format_rate(_WRITTEN_BYTES / seconds)} written"
    if free_bytes < _MIN_DISK_BYTES:
        return Finding(name, "problem", text, "free some space: checkpoints and weights will not fit")
    if free_bytes < _SMALL_DISK_BYTES:
        return Finding(name, "warning", text, "free some space, or keep fewer checkpoints (--keep-checkpoints)")
    return Finding(name, "ok", text)


def check_limits() -> Iterator[Finding]:
    """Check limits of the system that break runs with many links: open files, shared memory."""
    with contextlib.suppress(ImportError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        text = f"{soft} files may be open at once"
        if 0 <= soft < _MIN_FILES:
            yield Finding("open files", "warning", text, "raise the limit (ulimit -n 4096) before you coordinate a run")
        else:
            yield Finding("open files", "ok", text)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free_bytes = shutil.disk_usage(shared).free
        text = f"{format_bytes(free_bytes)} of shared memory are free"
        if free_bytes < _MIN_SHARED_BYTES:
            remedy = "clusters of one machine average through it: give a container more (docker run --shm-size 1g)"
            yield Finding("shared memory", "warning", text, remedy)
        else:
            yield Finding("shared memory", "ok", text)


def check_clock(now_s: float) -> Finding:
    text = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now_s))
    if now_s < _BUILT_S:
        return Finding("clock", "problem", f"{text} is long past", "set the clock: certificates are not valid yet then")
    return Finding("clock", "ok", text)


def judge_skew(skew_s: float) -> Finding:
    """Judge how far this clock is ahead of the coordinator's."""
    which = "ahead of" if skew_s > 0 else "behind"
    text = f"this clock is {format_seconds(abs(skew_s))} {which} the coordinator's"
    if abs(skew_s) >= _MAX_SKEW_S:
        return Finding("clock skew", "problem", text, "set the clock of the PC that is wrong: certificates have dates")
    if abs(skew_s) >= _NOTED_SKEW_S:
        return Finding("clock skew", "warning", text, "set the clocks by the network, so that logs can be compared")
    return Finding("clock skew", "ok", text)


def check_port(port: int) -> Finding:
    """Check that a coordinator could listen at a port of this PC."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", port))
            listener.listen(1)
        except OSError as error:
            remedy = "end the program that uses it, or choose another port (train --listen :PORT, join --port PORT)"
            return Finding("port", "problem", f"cannot listen at port {port}: {error.strerror or error}", remedy)
        number = listener.getsockname()[1]
    return Finding("port", "ok", f"a program can listen at port {number}")


def judge_nat(pairs: list[tuple[tuple[str, int], tuple[str, int]]]) -> Finding:
    """Judge the router from connections: the own address of each, and the one that the coordinator saw."""
    if all(own == seen for own, seen in pairs):
        return Finding("NAT", "ok", "no NAT between this PC and the coordinator")
    hosts = {seen[0] for _, seen in pairs}
    if len(hosts) > 1:
        text = f"a NAT with several public addresses ({', '.join(sorted(hosts))})"
    elif all(own[1] == seen[1] for own, seen in pairs):
        return Finding("NAT", "ok", f"a NAT that keeps ports; the coordinator sees {pairs[0][1][0]}")
    else:
        text = f"a NAT that changes ports; the coordinator sees {pairs[0][1][0]}"
    remedy = "links between homes may be relayed: forward a port of the router to this PC and give it with join --port"
    return Finding("NAT", "warning", text, remedy)


def judge_line(up_bytes_per_s: float, down_bytes_per_s: float, latency_s: float) -> Finding:
    up, down = format_rate(up_bytes_per_s), format_rate(down_bytes_per_s)
    text = f"{up} up, {down} down, {format_seconds(latency_s)} to the coordinator"
    if min(up_bytes_per_s, down_bytes_per_s) < _SLOW_LINE_BYTES_PER_S:
        return Finding("line", "warning", text, "use a cable; compress with --activation-compression int8 on the run")
    if latency_s > _SLOW_LATENCY_S:
        return Finding(
            "line", "warning", text, "the run keeps more microbatches in flight for it, and needs more memory"
        )
    return Finding("line", "ok", text)


def check_training(directory: Path | None = None, timeout_s: float = _TRAINING_S) -> Finding:
    """Train the sorting example with two worker processes, as `ravnest train` does."""
    name, example = "training", Path(__file__).parents[1] / "examples" / "sorter.py"
    with tempfile.TemporaryDirectory(prefix="ravnest-doctor-", dir=directory, ignore_cleanup_errors=True) as folder:
        command = [
            sys.executable, "-P", "-m", "ravnest", "train", str(example), "--local", "2", "--threads", "1", "--steps",
            str(_TRAINING_STEPS), "--dashboard-port", "0", "--log-json", "--run-dir", str(Path(folder) / "run"),
        ]  # fmt: skip
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Finding(
                name, "problem", f"two workers did not train {_TRAINING_STEPS} steps within {timeout_s:g} s",
                "see whether another program uses the processor, and try again",
            )  # fmt: skip
        finally:
            _kill(process)
        return _judge_training(output, errors, process.returncode, time.perf_counter() - began)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the run and its workers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.communicate()


def _judge_training(output: str, errors: str, code: int, seconds: float) -> Finding:
    lines = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    losses = [line["loss"] for line in lines if line.get("type") == "step"]
    if code or not losses:
        reason = (errors.strip().splitlines() or [f"exit code {code}"])[-1].removeprefix("ravnest: ")
        return Finding("training", "problem", f"a run with two workers failed: {reason}", "mend what it names")
    speed = next((line["samples_per_s"] for line in lines if line.get("type") == "end"), 0.0)
    text = f"two workers trained {len(losses)} steps in {seconds:.0f} s, {speed:,.0f} samples/s"
    if not losses[-1] < losses[0]:
        return Finding(
            "training", "problem", f"{text}, but the loss did not fall", "run it again; report it if it stays"
        )
    return Finding("training", "ok", f"{text}; the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")
