"""Runs whose nodes compute on processors and on accelerators, in real processes, as a user makes them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ravnest.config import TrainingConfig
from ravnest.coordinator.journal import replay
from ravnest.errors import RavnestError
from ravnest.node import worker_process
from ravnest.run.checkpoint.format import checkpoints_in
from ravnest.run.job import Run
from tests.accelerator.devices import TestAccelerator
from tests.accelerator.installed import install
from tests.integration.test_fleet import Friends, friends
from tests.integration.test_local import job
from tests.integration.test_local_faults import LocalRun, check_end, kill_in_phase

__all__ = ["friends"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GIVEN = {"memory": "2GB", "threads": 1}  # so that no device is measured


@pytest.fixture
def installed(
    accelerator: TestAccelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """The accelerator is present in this process and in those that it starts."""
    install(tmp_path / "package", monkeypatch, devices=2)
    worker_process._server.close_unused()  # the next one finds the accelerator
    yield monkeypatch
    worker_process._server.close_unused()


def train(folder: Path, **changes: Any) -> Run:
    options: dict[str, Any] = {"steps": 6, "on": "local:2", "speeds": "1,1", "mode": "sync", **GIVEN, **changes}
    return job().train(TrainingConfig(run_dir=folder, **options))


@pytest.mark.usefixtures("installed", "fixed_times")
def test_a_run_on_both_kinds_has_the_bits_of_one_on_processors(tmp_path: Path) -> None:
    """Dropout, clipping and tied weights included."""
    mixed, plain = (train(tmp_path / device[:3], device=device, steps=4) for device in ("testacc:0,cpu", "cpu"))
    assert mixed.losses == plain.losses
    assert all((mixed.state_dict()[name] == tensor).all() for name, tensor in plain.state_dict().items())
    on_device, on_host = mixed.stages[0].peak_memory_bytes, mixed.stages[1].peak_memory_bytes
    assert 10_000 < on_device < 20_000_000 < on_host, "of the device's allocator, without the process"


@pytest.mark.soak
@pytest.mark.usefixtures("installed")
def test_clusters_of_both_kinds_average_recover_and_resume_on_other_devices(tmp_path: Path) -> None:
    given = ["--memory", "2GB", "--speeds", "1,1,1,1", "--clusters", "2"]
    averaging = ["--average-every", "36", "--checkpoint-every", "20"]
    run = LocalRun(tmp_path, 4, *given, *averaging, "--device", "testacc:0,cpu,cpu,testacc:0")
    try:
        kill_in_phase(run, "forward", 0)
        moment = run.progress().rounds + 1
        run.wait_until(lambda: run.progress().rounds >= moment, "an averaging of both clusters")
        check_end(run, 1)
    finally:
        run.close()
    steps = checkpoints_in(run.folder)[-1].step + 5
    command = [sys.executable, "-m", "ravnest", "train", "job.py", "--local", "4", *given, "--resume", "run"]
    command += ["--device", "cpu,testacc:0,testacc:0,cpu", "--steps", str(steps)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"\b{steps} steps, final loss", done.stdout)


@pytest.mark.soak
def test_a_device_without_bfloat16_computes_in_float16(installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its neighbour computes in bfloat16."""
    installed.setenv("TESTACC_BF16", "0")
    run = train(tmp_path / "run", device="testacc:0,cpu", autocast="bf16", steps=40)
    assert run.losses[-1] < run.losses[0] - 1.0
    assert "has no bfloat16: computing in float16 with loss scaling" in (run.folder / "node-0.log").read_text()


@pytest.mark.soak
def test_a_device_without_enough_memory_ends_the_run_with_a_sentence(
    installed: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed.setenv("TESTACC_MEMORY", "200000")
    with pytest.raises(RavnestError, match=r"out of memory on testacc:0 \(Test Accelerator 0\) with .* in use"):
        train(tmp_path / "run", device="testacc:0,cpu")


def test_a_stage_that_runs_out_of_memory_is_planned_smaller(installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The node offers less than it ran out of, and a new plan is made with that: here, without the node."""
    installed.setenv("TESTACC_MEMORY", "200000")
    run = train(tmp_path / "run", on="local:3", device="testacc:0,cpu,cpu", speeds="1,1,1", clusters=0, steps=8)
    assert len(run.losses) == 8
    state, _ = replay(run.folder / "coordinator" / "journal")
    assert state.counters.quarantined == 1
    assert "out of memory on testacc:0" in state.nodes["node-0"].quarantine_reason
    assert state.nodes["node-0"].profile.memory_bytes < 200_000


@pytest.mark.soak
def test_pcs_with_and_without_an_accelerator_train_together(
    installed: pytest.MonkeyPatch, friends: Friends, tmp_path: Path
) -> None:
    """Each measures the device that it computes on."""
    installed.setenv("TESTACC_MEMORY", "1500000000")
    friends.devices = {"anna": "testacc:0", "bela": "cpu"}
    config = TrainingConfig(run_dir=tmp_path / "run", on="127.0.0.1:0", steps=20, settle_time_s=1.0, average_every=0)
    run = job().train(config, show=friends, coordinator_dir=tmp_path / "coordinator")
    assert len(run.losses) == 20
    state, _ = replay(tmp_path / "coordinator" / "journal")
    assert {name: node.profile.device for name, node in state.nodes.items()} == friends.devices
    assert state.nodes["anna"].profile.device_name == "Test Accelerator 0"
    assert state.nodes["anna"].profile.memory_bytes == 600_000_000
    assert "on testacc:0" in (tmp_path / "anna.log").read_text()


def test_a_device_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no device cuda:3 on this PC; its devices are cpu"):
        train(tmp_path / "run", device="cuda:3")
    with pytest.raises(ValueError, match="device must be one device, or one for each of 2 nodes, got 'cpu,cpu,cpu'"):
        train(tmp_path / "run", device="cpu,cpu,cpu")
