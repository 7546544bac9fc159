"""A run is put down and taken up again, as a user does it: the weights are those of one that was never stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from ravnest.run.checkpoint.format import checkpoints_in
from tests.unit.coordinator.conftest import small_disk

__all__ = ["small_disk"]

pytestmark = pytest.mark.slow

DISK_SIZE = "600k"  # room for the model, not for its optimizer state
JOB = """
import ravnest, torch
from ravnest.examples.text import batches, library_text
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
config = GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2, dropout={dropout}, tied=True)
optimizer = ravnest.AdamW(3e-3, schedule=ravnest.lr.cosine(60, warmup_steps=5){clip})
class Text:
    def __iter__(self):
        return batches(library_text(50_000), 12, 16, 0)
job = ravnest.Job(model=lambda: GPT(config), loss=next_token_loss, data=Text(), optimizer=optimizer)
"""
STEPS = 60
_PATIENCE_S = 600.0  # pytest has less


def command(folder: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "ravnest", "train", str(folder / "job.py"), "--threads", "1", *args]


def train(folder: Path, *args: str) -> str:
    done = subprocess.run(command(folder, *args), capture_output=True, text=True, cwd=folder, timeout=_PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_job(folder: Path, *, dropout: float = 0.1, clip: str = ", clip_norm=1.0") -> None:
    (folder / "job.py").write_text(JOB.format(dropout=dropout, clip=clip))


def different(one: Path, other: Path) -> list[str]:
    a, b = (load_file(run / "model.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    return [name for name, tensor in a.items() if not torch.equal(tensor, b[name])]


def steps_of(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "step" in line]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def kill_all(running: subprocess.Popen[str]) -> None:
    """The run and its workers at once, as when the power fails."""
    everybody = [*psutil.Process(running.pid).children(recursive=True), psutil.Process(running.pid)]
    for process in everybody:
        os.kill(process.pid, signal.SIGSTOP)  # so that none sees another die
    for process in everybody:
        os.kill(process.pid, signal.SIGKILL)
    running.communicate()


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped: late gradients, dropout, clipping, a tied table, three nodes."""
    folder = tmp_path_factory.mktemp("through")
    write_job(folder)
    train(folder, "--local", "3", "--steps", str(STEPS), "--checkpoint-every", "10", "--run-dir", "run")
    return folder


def copy_at(through: Path, folder: Path, step: int) -> Path:
    """A run that ended there."""
    shutil.copy(through / "job.py", folder)
    kept = folder / "run" / "checkpoints" / f"step-{step:06}"
    shutil.copytree(through / "run" / "checkpoints" / kept.name, kept)
    return folder / "run"


def test_what_a_run_keeps(through: Path) -> None:
    assert [c.step for c in checkpoints_in(through / "run")] == [40, 50, 60]
    assert all(c.problem() is None and c.manifest.batches == c.step for c in checkpoints_in(through / "run"))
    assert {p.name for p in (through / "run").iterdir()} == {
        "checkpoints", "job.txt", "metrics.jsonl", "model.safetensors", "node-0.log", "node-1.log", "node-2.log",
        "plan.json", "coordinator", "coordinator.txt", "dashboard.json",
    }  # fmt: skip


def test_a_run_that_was_killed_goes_on_bit_for_bit(through: Path, tmp_path: Path) -> None:
    write_job(tmp_path)
    given = ["--local", "3", "--steps", str(STEPS), "--checkpoint-every", "10"]
    running = subprocess.Popen(
        command(tmp_path, *given, "--run-dir", "run"), stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    end = time.monotonic() + _PATIENCE_S
    while not checkpoints_in(tmp_path / "run"):
        assert time.monotonic() < end
        time.sleep(0.01)  # nothing tells us when another process has got somewhere
    kill_all(running)
    run, (first, *_) = tmp_path / "run", [c.step for c in checkpoints_in(tmp_path / "run")][::-1]
    assert not (run / "model.safetensors").exists(), "it was over before it was killed"
    output = train(tmp_path, *given, "--resume", "run")
    assert f"step-{first:06}, after {first} steps" in output
    assert "cut as before" in output
    assert f"skipping {first} batches" in output
    assert f" {STEPS} steps, final loss" in output, "of the whole run"
    assert different(run, through / "run") == []
    assert steps_of(run) == list(range(1, STEPS + 1))
    assert losses(run) == losses(through / "run")
    assert [c.step for c in checkpoints_in(run)] == [40, 50, 60]
    assert [p for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []


@pytest.mark.soak
def test_on_other_nodes_it_goes_on_the_same(tmp_path: Path) -> None:
    """Synchronous, and no random numbers, which depend on the stage: other cuts change nothing at all."""
    write_job(tmp_path, dropout=0.0, clip="")
    given = ["--mode", "sync", "--microbatches-per-step", "1"]
    train(tmp_path, *given, "--local", "2", "--steps", "16", "--run-dir", "whole")
    train(tmp_path, *given, "--local", "2", "--steps", "8", "--checkpoint-every", "100", "--run-dir", "run")
    assert [c.step for c in checkpoints_in(tmp_path / "run")] == [8], "the end is a checkpoint too"
    output = train(tmp_path, *given, "--local", "3", "--steps", "16", "--resume", "run", "--run-dir", "on")
    assert "split over 3 nodes, it was over 2" in output
    assert different(tmp_path / "on", tmp_path / "whole") == []
    assert steps_of(tmp_path / "on") == list(range(9, 17))


REFUSED = {
    "another model": ("width=32", "width=48", [], "the model is not that of"),
    "another optimizer": ("AdamW", "NAdam", [], "the optimizer is not that of .*it is NAdam"),
    "another seed": ("", "", ["--seed", "4"], "the run has seed 0, which cannot be changed"),
    "fewer steps": ("", "", ["--steps", "39"], "steps must be >= 40, the steps that the run has made, got 39"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_sentence(
    name: str,
    through: Path,
    tmp_path: Path,
    run_cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new, args, sentence = REFUSED[name]
    copy_at(through, tmp_path, 40)
    (tmp_path / "job.py").write_text((tmp_path / "job.py").read_text().replace(old, new, 1))
    monkeypatch.chdir(tmp_path)
    code, _, errors = run_cli("train", "job.py", "--resume", "run", "--local", "1", *args)
    assert code == 2
    assert re.search(sentence, errors.replace("\n", " ")), errors


@pytest.mark.soak
def test_an_earlier_checkpoint_needs_a_folder_of_its_own(through: Path, tmp_path: Path) -> None:
    named = through / "run" / "checkpoints" / "step-000040"
    done = subprocess.run(
        command(through, "--local", "3", "--steps", "42", "--resume", str(named)), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "has later checkpoints (step-000050, step-000060)" in done.stderr.replace("\n", " ")
    train(through, "--local", "3", "--steps", "42", "--resume", str(named), "--run-dir", str(tmp_path / "branch"))
    assert losses(tmp_path / "branch") == losses(through / "run")[40:42]


def test_a_full_disk_costs_checkpoints_and_no_training(small_disk: Path) -> None:
    write_job(small_disk)
    output = train(small_disk, "--local", "2", "--steps", "12", "--checkpoint-every", "4", "--run-dir", "run")
    assert re.search(r"the checkpoint of step 4 was not written, training continues: .*No space", output)
    assert "12 steps, final loss" in output
    assert set(steps_of(small_disk / "run")) <= set(range(1, 13)), "whole lines only"
    assert checkpoints_in(small_disk / "run") == []
    assert list((small_disk / "run" / "checkpoints").iterdir()) == []
    assert load_file(small_disk / "run" / "model.safetensors")
