"""Part (c) of `benchmarks.rings`: measures the slowdown of training during averaging.

    python -m benchmarks.rings.slowdown --json FILE

Two PCs, each a cluster with the whole model and a core of its own, train by `ravnest train --listen` and `ravnest join`
and average over TLS, limited to 100 Mbit/s up: a round takes seconds. Rounds take about half of the time, so training
with and without averaging alternates every few seconds of one run; `benchmarks.rings.round_rates` compares them.
Results are medians over the rounds.
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
from benchmarks.rings.round_cost import add_costs
from benchmarks.rings.round_rates import rates_of_rounds, read_events

__all__ = ["add_slowdown"]

UPLOAD = "100 Mbit/s"
AVERAGE_EVERY = 64  # samples of a cluster
TIMEOUT_S = 240.0
_RAVNEST = (sys.executable, "-m", "ravnest")
_TICKET = re.compile(r"rav1-\S+(?=\s)")  # complete only with the white space after it


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(f"training while averaging: two clusters, {UPLOAD}")
    add_slowdown(report, quick=options.quick)
    report.finish(options.json)


def add_slowdown(report: Report, *, quick: bool) -> None:
    """Add samples per second during and between rounds, and the costs of a round."""
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder:
        began_s, before_s = time.monotonic(), _background_s()
        train(Path(folder), steps=130 if quick else 300)
        background_cores = (_background_s() - before_s) / (time.monotonic() - began_s)
        rounds = rates_of_rounds(read_events(Path(folder) / "coordinator" / "journal"), num_clusters=2)
    ratios = [rates.during / rates.between for rates in rounds]
    report.rows.append(
        {"rounds": len(rounds), "seconds of a round": statistics.median(rates.seconds for rates in rounds),
         "samples/s between rounds": statistics.median(rates.between for rates in rounds),
         "samples/s while averaging": statistics.median(rates.during for rates in rounds),
         "ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    )  # fmt: skip
    add_costs(report)
    report.check("samples/s while averaging / between rounds", statistics.median(ratios), ">= 0.9")
    report.check("background cores while training", background_cores, "<= 0.3")


def train(folder: Path, steps: int) -> None:
    """Run a training with two nodes on this machine."""
    job, port = Path(__file__).with_name("slowdown_job.py"), _free_port()
    command = [*_RAVNEST, "train", str(job), "--listen", f"127.0.0.1:{port}", "--min-nodes", "2", "--settle-time", "1s"]
    command += ["--allow-single-node", "--steps", str(steps), "--average-every", str(AVERAGE_EVERY)]
    command += ["--run-dir", str(folder / "run"), "--coordinator-dir", str(folder / "coordinator")]
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
        if training.wait(TIMEOUT_S) != 0:
            raise RuntimeError(f"the requester failed: {(folder / 'requester.log').read_text()[-1500:]}")


@contextmanager
def _running(command: Sequence[str], log: Path, *, core: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block ends; with `core`, it and its children are pinned there."""
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
        process.wait(TIMEOUT_S)


def _ticket(training: subprocess.Popen[bytes], log: Path) -> str:
    """The ticket that the requester prints."""
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s and training.poll() is None:
        if found := _TICKET.search(log.read_text()):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(f"the requester printed no ticket: {log.read_text()[-1500:]}")


def _background_s() -> float:
    """CPU seconds of the machine without those of this process and of its children that have exited."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq - sum(os.times()[:4]))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
