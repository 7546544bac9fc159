"""Trains a job file in one process with plain PyTorch, on the batches that another run has trained.

    python -P -m ravnest.run.reference --job job.py --batches-per-update 2

Each line of the input is a number of batches: all before it may be trained. The last line may be followed by the end of
the input; then the held-out loss is computed. Each line of the output is a JSON object: `batches` and the training
`loss` after an update, at last `batches` and `held_out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ravnest.core.config import require
from ravnest.pipeline.optimizers import torch_optimizer
from ravnest.run.job import Job

__all__ = ["Reference"]

_NICENESS = 5  # the run comes first


class Reference:
    """A training of the same batches in a process of its own, which never trains a batch before the run has."""

    def __init__(self, job: Path, *, seed: int, batches_per_update: int, validation_batches: int) -> None:
        self._every = batches_per_update
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ravnest.run.reference", "--job", str(job), "--seed", str(seed),
             "--batches-per-update", str(batches_per_update), "--validation-batches", str(validation_batches)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.losses: list[tuple[int, float]] = []  # batches, and the loss of the update with the last of them
        self.held_out: float | None = None
        self._reader = threading.Thread(target=self._read, name="reference", daemon=True)
        self._reader.start()

    def allow(self, batches: int) -> None:
        """Let it train the batches before this number."""
        if batches % self._every == 0:
            self._write(f"{batches}\n")

    def finish(self, timeout_s: float) -> float | None:
        """Wait until the allowed batches are trained; return the held-out loss, None if that takes longer."""
        with contextlib.suppress(OSError):
            self._input.close()
        self._reader.join(timeout_s)
        self.close()
        return self.held_out

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    @property
    def _input(self) -> Any:
        assert self._process.stdin is not None
        return self._process.stdin

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended: the comparison is missing, the run is not
            self._input.write(text)
            self._input.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            values = json.loads(line)
            if "held_out" in values:
                self.held_out = values["held_out"]
            else:
                self.losses.append((values["batches"], values["loss"]))


def _allowed(lines: Iterator[str]) -> Iterator[int]:
    """Yield each batch number as soon as it may be trained."""
    numbers: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def read() -> None:
        for line in lines:
            numbers.put(int(line))
        numbers.put(None)

    threading.Thread(target=read, daemon=True).start()
    done = 0
    while (end := numbers.get()) is not None:
        yield from range(done, end)
        done = max(done, end)


def _train(
    job: Job, seed: int, every: int, validation_batches: int, lines: Iterator[str]
) -> Iterator[dict[str, float]]:
    require(callable(job.model) and job.loss is not None, "the job must have a builder of its model, and a loss")
    torch.manual_seed(seed)
    model: Any = job.model()  # type: ignore[operator]
    optimizer = torch_optimizer(job.optimizer, list(model.parameters()), fused=False)
    batches = iter(job.data)
    total = 0.0
    for number in _allowed(lines):
        inputs, targets = next(batches)
        loss = job.loss(model(inputs), targets) / every  # type: ignore[misc]
        loss.backward()
        total += loss.item()
        if (number + 1) % every == 0:
            for group in optimizer.param_groups:
                group["lr"] = job.optimizer.lr * job.optimizer.schedule.ratio(number // every)
            optimizer.step()
            optimizer.zero_grad()
            yield {"batches": number + 1, "loss": total}
            total = 0.0
    model.eval()
    with torch.no_grad():
        held_out = list(islice(iter(job.validation or ()), validation_batches))
        losses = [job.loss(model(inputs), targets).item() for inputs, targets in held_out]  # type: ignore[misc]
    if losses:
        yield {"held_out": sum(losses) / len(losses)}


def main() -> None:
    from ravnest.run.job_file import load_job

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches-per-update", type=int, default=1)
    parser.add_argument("--validation-batches", type=int, default=32)
    options = parser.parse_args()
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    torch.set_num_threads(1)
    job = load_job(options.job).job
    every, held_out = options.batches_per_update, options.validation_batches
    for values in _train(job, options.seed, every, held_out, iter(sys.stdin)):
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
