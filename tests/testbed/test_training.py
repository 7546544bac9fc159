"""Five PCs in three homes train a GPT for a coordinator that none of them could reach but by its ticket.

anna and bela are behind plain NATs, carl behind one that cannot be punched, and bela's line has 20 Mbit/s and 40 ms.
The first two to join, of anna and bela, make a cluster; the three that come later make another.
"""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ravnest.examples import char_gpt
from ravnest.testbed import Home, HostSpec, Line, Process, Testbed, Topology

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FAST = Line(up_bytes_per_s=12.5e6, down_bytes_per_s=12.5e6, delay_s=0.005)
SLOW = Line(up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e6, delay_s=0.04)
TOPOLOGY = Topology(
    homes=(Home(name="anna"), Home(name="bela"), Home(name="carl", nat="symmetric")),
    hosts=(
        HostSpec(name="hub", line=Line(delay_s=0.002)),
        HostSpec(name="anna-1", home="anna", line=FAST, cpu=0.9),
        HostSpec(name="bela-1", home="bela", line=SLOW, cpu=0.7),
        HostSpec(name="anna-2", home="anna", line=FAST, cpu=0.6),
        HostSpec(name="carl-1", home="carl", line=FAST, cpu=0.7),
        HostSpec(name="carl-2", home="carl", line=FAST, cpu=0.6),
    ),
)
SIZES = {"anna-1": "900MB", "bela-1": "600MB", "anna-2": "700MB", "carl-1": "1GB", "carl-2": "650MB"}
COMMAND = (sys.executable, "-m", "ravnest")
JOB = """
from dataclasses import replace
from ravnest.examples.char_gpt import job
job = replace(job, training=replace(job.training, validation_batches=2))
"""


def start(bed: Testbed, host: str, folder: Path, *command: str) -> Process:
    with (folder / f"{host}.log").open("w") as log:
        return bed.hosts[host].run([*COMMAND, *command], cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def wait_until(is_so: Callable[[], bool], within_s: float, folder: Path) -> None:
    until = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > until:
            logs = "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))
            pytest.fail(f"it did not come to that within {within_s:g} s\n{logs}")
        time.sleep(0.1)


def said(folder: Path) -> str:
    return (folder / "hub.log").read_text()


def steps_of(folder: Path) -> dict[str, list[float]]:
    """The losses of each cluster."""
    found: dict[str, list[float]] = {}
    path = folder / "run" / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        step = json.loads(line)
        if "step" in step:
            found.setdefault(step["cluster"], []).append(step["loss"])
    return found


def entropy_bits(data: bytes) -> float:
    """Per byte; 8 for what looks like noise."""
    shares = np.bincount(np.frombuffer(data, np.uint8), minlength=256) / len(data)
    return -float(sum(share * math.log2(share) for share in shares if share))


def test_five_pcs_in_three_homes(testbed: Callable[[Topology], Testbed], tmp_path: Path) -> None:
    bed = testbed(TOPOLOGY)
    (tmp_path / "job.py").write_text(JOB)
    train = ["train", "job.py", "--listen", ":7700", "--coordinator", "keys", "--folder", "run"]
    coordinator = start(bed, "hub", tmp_path, *train, "--steps", "100000", "--wait", "8s")
    wait_until(lambda: "rav1-" in said(tmp_path), 60, tmp_path)
    ticket = re.findall(r"rav1-[a-z0-9]+", said(tmp_path))[0]

    def join(*hosts: str) -> None:
        for host in hosts:
            lent = ["--memory", SIZES[host], "--threads", "1", "--data-dir", f"data-{host}"]
            start(bed, host, tmp_path, "join", ticket, *lent)
        wait_until(lambda: all(f"{host} is ready" in said(tmp_path) for host in hosts), 90, tmp_path)

    join("anna-1", "bela-1")
    first = sum(map(len, steps_of(tmp_path).values()))
    with bed.capture("anna-1") as near, bed.capture("hub") as hub:
        join("anna-2", "carl-1", "carl-2")
        wait_until(lambda: sum(len(found) >= 25 for found in steps_of(tmp_path).values()) >= 2, 90, tmp_path)
    coordinator.send_signal(signal.SIGINT)
    assert coordinator.wait(60) == 0, said(tmp_path)

    losses = steps_of(tmp_path)
    begin = next(iter(losses.values()))[0]
    for cluster, found in losses.items():
        if len(found) >= 25:
            assert sum(found[-5:]) / 5 < 0.7 * begin, f"the loss of {cluster} does not fall: {found}"
    kinds = set(re.findall(r"has a (direct|punched|relayed) link", said(tmp_path)))
    assert kinds == {"direct", "punched", "relayed"}, said(tmp_path)
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert "round 1 is averaged" in said(tmp_path)
    assert "the average of its clusters" in said(tmp_path)

    assert near.num_missed == hub.num_missed == 0
    for seen in (near.bytes(), hub.bytes()):
        assert len(seen) > 2_000_000
        assert entropy_bits(seen) > 7.8  # activations in the clear have less than 7.5
    seen = hub.bytes()
    for inputs, _ in _batches(range(first + 5, first + 35)):
        assert inputs[0].numpy().tobytes()[:64] not in seen, "a batch was sent in the clear"


def _batches(numbers: range) -> list[Any]:
    return list(islice(char_gpt.job.data, numbers.start, numbers.stop))
