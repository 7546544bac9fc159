"""Averaging, part (c): how much slower clusters train while they average.

    python -m benchmarks.rings_slowdown --json FILE

Two PCs, each a cluster with the whole model and a core of its own, train by `ravnest train --listen` and `ravnest join`
and average over TLS, sending 100 Mbit/s at most: a round takes seconds. Rounds come so often that about half of the
time there is one, so with and without alternate every few seconds of one run; `rings_slowdown_account` compares them.
Medians over the rounds.
"""

from __future__ import annotations

import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.report import Report, arguments
from benchmarks.rings_slowdown_account import account, read
from benchmarks.rings_slowdown_parts import add_parts

__all__ = ["add_slowdown"]

UPLOAD = "100 Mbit/s"
AVERAGE_EVERY = 64  # samples of a cluster
PATIENCE_S = 240.0
_RAVNEST = (sys.executable, "-m", "ravnest")
_TICKET = re.compile(r"rav1-\S+(?=\s)")  # whole, with what comes after it


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(f"training while averaging: two clusters, {UPLOAD}")
    add_slowdown(report, quick=options.quick)
    report.finish(options.json)


def add_slowdown(report: Report, *, quick: bool) -> None:
    """Samples per second with and without, and what the difference is made of."""
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder:
        began_s, others_s = time.monotonic(), _others_s()
        train(Path(folder), steps=130 if quick else 300)
        others_cores = (_others_s() - others_s) / (time.monotonic() - began_s)
        found = account(read(Path(folder) / "coordinator" / "journal"), num_clusters=2)
    ratios = [rates.during / rates.between for rates in found]
    report.rows.append(
        {"rounds": len(found), "seconds of a round": statistics.median(rates.seconds for rates in found),
         "samples/s between rounds": statistics.median(rates.between for rates in found),
         "samples/s while averaging": statistics.median(rates.during for rates in found),
         "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    )  # fmt: skip
    add_parts(report)
    report.check("samples/s while averaging / between rounds", statistics.median(ratios), ">= 0.9")
    report.check("cores that others used while training", others_cores, "<= 0.3")


def train(folder: Path, steps: int) -> None:
    """A whole run of two nodes, here."""
    job, port = Path(__file__).with_name("rings_slowdown_job.py"), _free_port()
    command = [*_RAVNEST, "train", str(job), "--listen", f"127.0.0.1:{port}", "--min-nodes", "2", "--wait", "1s"]
    command += ["--whole", "--steps", str(steps), "--average-every", str(AVERAGE_EVERY)]
    command += ["--folder", str(folder / "run"), "--coordinator", str(folder / "coordinator")]
    with ExitStack() as stack:
        training = stack.enter_context(_running(command, folder / "requester.log"))
        ticket = _ticket(training, folder / "requester.log")
        cores = sorted(os.sched_getaffinity(0))
        for number in range(2):
            name = f"pc-{number}"
            options = ["--name", name, "--memory", "2GB", "--threads", "1", "--max-upload", UPLOAD]
            options += ["--data-dir", str(folder / name)]
            core = cores[number % len(cores)]
            stack.enter_context(_running([*_RAVNEST, "join", ticket, *options], folder / f"{name}.log", core=core))
        if training.wait(PATIENCE_S) != 0:
            raise RuntimeError(f"the requester left: {(folder / 'requester.log').read_text()[-1500:]}")


@contextmanager
def _running(command: Sequence[str], log: Path, *, core: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process until the block ends; with `core`, it and its children run there."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        with log.open("w") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    finally:
        os.sched_setaffinity(0, before)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _ticket(training: subprocess.Popen[bytes], log: Path) -> str:
    """The word that the requester prints for others to join with."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s and training.poll() is None:
        if found := _TICKET.search(log.read_text()):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"the requester printed no ticket: {log.read_text()[-1500:]}")


def _others_s() -> float:
    """Processor seconds of the machine that were not of this process or of those that it started and that ended."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq - sum(os.times()[:4]))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
