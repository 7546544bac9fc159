"""Averaging, part (c): how much slower clusters train while they average.

    python -m benchmarks.rings_slowdown --json FILE

Two PCs, each a cluster with the whole model and a core of its own, train by `ravnest train --listen` and `ravnest join`
and average over TLS, sending 100 Mbit/s at most: a round takes seconds. Rounds come so often that about half of the
time there is one. All in one run, so that with and without alternate every few seconds: the coordinator's journal says
when batches were settled and when rounds began and ended. With r0 the samples/s between rounds, over all stretches
from one settled batch to the next of its cluster that a round touches,

    samples/s while averaging = (their samples - r0 * their seconds outside of rounds) / their seconds inside

A round begins with a snapshot and ends when the average has been taken over: both count.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from benchmarks.report import Report, arguments
from benchmarks.rings_slowdown_parts import add_parts
from ravnest.coordinator.events import Event, LeaseSettled, RoundClosed, RoundCommitted, RoundOpened
from ravnest.coordinator.journalfile import Snapshot

__all__ = ["add_slowdown"]

UPLOAD = "100 Mbit/s"
AVERAGE_EVERY = 64  # samples of a cluster
WARM_UP_S = 4.0  # of training that does not count
PATIENCE_S = 240.0
_RAVNEST = (sys.executable, "-m", "ravnest")
_TICKET = re.compile(r"rav1-\S+(?=\s)")  # whole, with what comes after it
_HEAD = struct.Struct("!II")  # of a record in the journal: its length, and a checksum


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(f"training while averaging: two clusters, {UPLOAD}")
    add_slowdown(report, quick=options.quick)
    report.finish(options.json)


def add_slowdown(report: Report, *, quick: bool) -> None:
    """Samples per second with and without, and what the difference is made of."""
    with tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder:
        train(Path(folder), steps=150 if quick else 700)
        found = account(read(Path(folder) / "coordinator" / "journal"))
    report.rows.append(
        {"rounds": found.num_rounds, "seconds of a round": found.inside_s / found.num_rounds,
         "samples/s between rounds": found.between, "samples/s while averaging": found.during}
    )  # fmt: skip
    add_parts(report)
    report.check("samples/s while averaging / between rounds", found.during / found.between, ">= 0.9")


@dataclass(frozen=True)
class Found:
    """Samples per second of both clusters; rounds, and the seconds that they took together."""

    between: float
    during: float
    num_rounds: int
    inside_s: float


class _Tally:
    """Samples and seconds of stretches that rounds touch, and of those that they do not."""

    def __init__(self) -> None:
        self.samples, self.seconds = 0, 0.0
        self.touched_samples, self.touched_s, self.inside_s = 0, 0.0, 0.0

    def add(self, samples: int, seconds: float, inside_s: float) -> None:
        if inside_s:
            self.touched_samples += samples
            self.touched_s += seconds
            self.inside_s += inside_s
        else:
            self.samples += samples
            self.seconds += seconds

    @property
    def between(self) -> float:
        return self.samples / self.seconds

    @property
    def during(self) -> float:
        return (self.touched_samples - self.between * (self.touched_s - self.inside_s)) / self.inside_s


def account(events: Sequence[Event]) -> Found:
    """What the journal says, between the warm-up and the last round, in which nothing is trained."""
    settled, rounds = defaultdict[str, list[tuple[float, int]]](list), list[tuple[float, float]]()
    opened_s, is_committed = 0.0, False
    for event in events:
        match event:
            case RoundOpened(at_s=at_s, attempt=attempt):
                opened_s, is_committed = opened_s if attempt else at_s, False
            case RoundCommitted():
                is_committed = True
            case RoundClosed(at_s=at_s):
                if not is_committed:
                    raise RuntimeError(f"a round failed: {event.reason}")
                rounds.append((opened_s, at_s))
            case LeaseSettled(at_s=at_s, cluster=cluster, samples=samples):
                settled[cluster].append((at_s, samples))
    begin_s = max(batches[0][0] for batches in settled.values()) + WARM_UP_S
    end_s = min(rounds[-1][0], *(batches[-1][0] for batches in settled.values()))
    rounds = [(a, b) for a, b in rounds if a >= begin_s and b <= end_s]
    tallies = [
        _tally([batch for batch in batches if begin_s <= batch[0] <= end_s], rounds) for batches in settled.values()
    ]
    if len(tallies) != 2 or not rounds:
        raise RuntimeError(
            f"{len(tallies)} clusters trained and averaged {len(rounds)} times: there is nothing to compare"
        )
    return Found(
        between=sum(tally.between for tally in tallies), during=sum(tally.during for tally in tallies),
        num_rounds=len(rounds), inside_s=sum(b - a for a, b in rounds),
    )  # fmt: skip


def _tally(batches: Sequence[tuple[float, int]], rounds: Sequence[tuple[float, float]]) -> _Tally:
    tally = _Tally()
    for (from_s, _), (to_s, samples) in pairwise(batches):
        inside_s = sum(max(0.0, min(to_s, b) - max(from_s, a)) for a, b in rounds)
        tally.add(samples, to_s - from_s, inside_s)
    return tally


def read(journal: Path) -> list[Event]:
    """All events of a journal that was closed well."""
    data, start, events = journal.read_bytes(), 0, list[Event]()
    decoder = msgspec.msgpack.Decoder(Event | Snapshot)
    while start < len(data):
        length, _ = _HEAD.unpack_from(data, start)
        start += _HEAD.size
        record = decoder.decode(data[start : start + length])
        start += length
        if not isinstance(record, Snapshot):
            events.append(record)
    return events


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


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
