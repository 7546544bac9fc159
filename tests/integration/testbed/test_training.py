"""Five PCs in three homes train a GPT for a coordinator that they know only by its ticket.

anna and bela are behind plain NATs, carl behind a symmetric one, and bela's line has 20 Mbit/s and 40 ms. The first two
PCs to join, of anna and bela, form a cluster; the three that join later form another.
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
from testbed import Home, HostSpec, Line, Process, Testbed, Topology

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

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
job = replace(job, config=replace(job.config, validation_batches=2))
"""


def start(testbed: Testbed, host: str, folder: Path, *command: str) -> Process:
    with (folder / f"{host}.log").open("w") as log:
        return testbed.hosts[host].run([*COMMAND, *command], cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def wait_until(predicate: Callable[[], bool], timeout_s: float, folder: Path) -> None:
    end_s = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > end_s:
            logs = "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))
            pytest.fail(f"not reached within {timeout_s:g} s\n{logs}")
        time.sleep(0.1)


def coordinator_log(folder: Path) -> str:
    return (folder / "hub.log").read_text()


def losses_of(folder: Path) -> dict[str, list[float]]:
    """The training losses of each cluster."""
    losses: dict[str, list[float]] = {}
    path = folder / "run" / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        step = json.loads(line)
        if "step" in step:
            losses.setdefault(step["cluster"], []).append(step["loss"])
    return losses


def entropy_bits(data: bytes) -> float:
    """The entropy per byte; 8 for random bytes."""
    shares = np.bincount(np.frombuffer(data, np.uint8), minlength=256) / len(data)
    return -float(sum(share * math.log2(share) for share in shares if share))


def test_five_pcs_in_three_homes(make_testbed: Callable[[Topology], Testbed], tmp_path: Path) -> None:
    testbed = make_testbed(TOPOLOGY)
    (tmp_path / "job.py").write_text(JOB)
    train = ["train", "job.py", "--listen", ":7700", "--coordinator", "keys", "--folder", "run"]
    coordinator = start(testbed, "hub", tmp_path, *train, "--steps", "100000", "--wait", "8s")
    wait_until(lambda: "rav1-" in coordinator_log(tmp_path), 60, tmp_path)
    ticket = re.findall(r"rav1-[a-z0-9]+", coordinator_log(tmp_path))[0]

    def join(*hosts: str) -> None:
        for host in hosts:
            options = ["--memory", SIZES[host], "--threads", "1", "--data-dir", f"data-{host}"]
            start(testbed, host, tmp_path, "join", ticket, *options)
        wait_until(lambda: all(f"{host} is ready" in coordinator_log(tmp_path) for host in hosts), 90, tmp_path)

    join("anna-1", "bela-1")
    num_steps = sum(map(len, losses_of(tmp_path).values()))
    with testbed.capture("anna-1") as near, testbed.capture("hub") as hub:
        join("anna-2", "carl-1", "carl-2")
        wait_until(lambda: sum(len(values) >= 25 for values in losses_of(tmp_path).values()) >= 2, 90, tmp_path)
    coordinator.send_signal(signal.SIGINT)
    assert coordinator.wait(60) == 0, coordinator_log(tmp_path)

    losses = losses_of(tmp_path)
    first_loss = next(iter(losses.values()))[0]
    for cluster, values in losses.items():
        if len(values) >= 25:
            assert sum(values[-5:]) / 5 < 0.7 * first_loss, f"the loss of {cluster} does not fall: {values}"
    kinds = set(re.findall(r"has a (direct|punched|relayed) link", coordinator_log(tmp_path)))
    assert kinds == {"direct", "punched", "relayed"}, coordinator_log(tmp_path)
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert "round 1 is averaged" in coordinator_log(tmp_path)
    assert "the average of its clusters" in coordinator_log(tmp_path)

    assert near.num_missed == hub.num_missed == 0
    for seen in (near.bytes(), hub.bytes()):
        assert len(seen) > 2_000_000
        assert entropy_bits(seen) > 7.8  # unencrypted activations have less than 7.5
    seen = hub.bytes()
    for inputs, _ in _batches(range(num_steps + 5, num_steps + 35)):
        assert inputs[0].numpy().tobytes()[:64] not in seen, "a batch was sent unencrypted"


def _batches(numbers: range) -> list[Any]:
    return list(islice(char_gpt.job.data, numbers.start, numbers.stop))
