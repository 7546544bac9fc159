"""Tries many models in worker processes, so that none of them can stop the survey or fill the memory of all.

A worker gets the name of a subject on its standard input and answers with a line of JSON. A subject that takes too long
is ended together with its worker.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.coverage.case import NotTried, Outcome, Subject, examine
from benchmarks.coverage.heads import TASKS
from benchmarks.coverage.huggingface import architectures
from benchmarks.coverage.layers import layers, losses, operations
from benchmarks.coverage.vision import timm_families, torchvision_models

__all__ = ["GROUPS", "subjects", "survey"]

CPU_LIMIT_S = 150  # of computing, for all forms of one model
TIMEOUT_S = 900  # for a model that waits for something
GROUPS: dict[str, Callable[[], Iterable[Subject]]] = {
    "layer": layers, "loss": losses, "operation": operations, "timm": timm_families, "torchvision": torchvision_models,
    **{task: partial(architectures, task) for task in TASKS},
}  # fmt: skip
_RESTART_AFTER = 40  # subjects, so that what models leave in memory does not add up


def subjects(groups: Sequence[str]) -> Iterator[Subject]:
    for group in groups:
        yield from GROUPS[group]()


def survey(names: Sequence[tuple[str, str]], processes: int, record: Path | None) -> Iterator[Outcome]:
    """Try the subjects (group, name). Outcomes are appended to `record`; subjects that are there are not repeated.

    Without processes, only those that are there are yielded.
    """
    known = _recorded(record)
    yield from (outcome for key in names for outcome in known.get(key, ()))
    waiting: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
    found: queue.SimpleQueue[list[Outcome]] = queue.SimpleQueue()
    missing = [key for key in names if key not in known] if processes else []
    for key in missing:
        waiting.put(key)
    for _ in range(processes):
        waiting.put(None)
        threading.Thread(target=_serve, args=(waiting, found), daemon=True).start()
    for _ in missing:
        outcomes = found.get()
        if record is not None:
            with record.open("a") as file:
                file.write(json.dumps([asdict(o) for o in outcomes]) + "\n")
        yield from outcomes


def _recorded(record: Path | None) -> dict[tuple[str, str], list[Outcome]]:
    if record is None or not record.exists():
        return {}
    lines = [msgspec.json.decode(line, type=list[Outcome]) for line in record.read_text().splitlines()]
    return {(outcomes[0].group, outcomes[0].name): outcomes for outcomes in lines}


def _serve(waiting: queue.SimpleQueue[tuple[str, str] | None], found: queue.SimpleQueue[list[Outcome]]) -> None:
    """Have a worker process try subjects, with a new process now and then."""
    worker, served = None, 0
    while (key := waiting.get()) is not None:
        if worker is None or served % _RESTART_AFTER == 0:
            _end(worker)
            worker = _start()
        served += 1
        outcomes = _answer(worker, key)
        if worker.poll() is not None:
            worker = None
        found.put(outcomes)
    _end(worker)


def _start() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.coverage.survey"], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _end(worker: subprocess.Popen[str] | None) -> None:
    if worker is not None:
        worker.kill()
        worker.wait()


def _answer(worker: subprocess.Popen[str], key: tuple[str, str]) -> list[Outcome]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    timer = threading.Timer(TIMEOUT_S, worker.kill)
    timer.start()
    try:
        worker.stdin.write(json.dumps(key) + "\n")
        worker.stdin.flush()
        line = worker.stdout.readline()
    except OSError:
        line = ""
    finally:
        is_late = not timer.is_alive()
        timer.cancel()
    if line:
        return msgspec.json.decode(line, type=list[Outcome])
    worker.wait()
    is_late = is_late or worker.returncode == -signal.SIGPROF
    reason = f"took longer than {CPU_LIMIT_S} s" if is_late else f"the process ended with {worker.returncode}"
    return [Outcome(key[1], key[0], "any", "refused" if is_late else "crashed", reason)]


def try_subject(subject: Subject) -> list[Outcome]:
    """All outcomes of a subject."""
    try:
        cases = subject.cases()
    except Exception as error:  # no configuration of it works in plain PyTorch, or a library is missing
        text = str(error) if isinstance(error, NotTried) else f"{type(error).__name__}: {error}"
        return [Outcome(subject.name, subject.group, "any", "not tried", text[:400])]
    return [examine(case, form) for case in cases for form in case.forms]


def main() -> None:
    """Answer the lines of standard input; what models print goes to standard error."""
    import torch

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    by_key: dict[tuple[str, str], Subject] = {}
    for line in sys.stdin:
        group, name = json.loads(line)
        if (group, name) not in by_key:
            by_key.update({(s.group, s.name): s for s in GROUPS[group]()})
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # its signal ends the process
        outcomes = try_subject(by_key[group, name])
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps([asdict(o) for o in outcomes]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
