"""Where a model is compared with its program: in memory, on the disk, or nowhere, by what is free."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ravnest
from ravnest.graph import Program, trace
from ravnest.run import model_check
from ravnest.run.metrics import ProgressView
from ravnest.run.model_check import CannotVerify, verification_folder


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def batch() -> Any:
    return torch.ones(4, 4), torch.zeros(4, 1)


def free(monkeypatch: pytest.MonkeyPatch, *, memory: int, disk: int = 10**6, system: str = "ext4") -> None:
    monkeypatch.setattr(model_check, "host_memory", lambda: SimpleNamespace(usable_bytes=memory))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=disk))
    monkeypatch.setattr(model_check, "_file_system", lambda path: system)


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(build, nn.functional.mse_loss, batch())


def test_memory_first_then_the_disk(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, memory=10_000)
    assert verification_folder(program, tmp_path) is None
    free(monkeypatch, memory=780)  # the parameters have 196 bytes: two copies of them, and two gradients
    assert verification_folder(program, tmp_path / "not" / "yet") == tmp_path
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"memory": 780, "disk": 100}, "needs 784 B, 780 B of memory are free and 100 B on the disk"),
        ({"memory": 780, "system": "tmpfs"}, "is in memory too: choose a directory on a disk with --run-dir"),
        ({"memory": 500}, "with tensors on the disk, 768 B"),
    ],
)
def test_otherwise_the_reason_is_given(
    program: Program, tmp_path: Path, limits: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, **limits)
    with pytest.raises(CannotVerify, match=reason):
        verification_folder(program, tmp_path)


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


class Messages(ProgressView):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def test_a_job_is_verified_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, memory=780)
    shown = Messages()

    def wrong() -> nn.Module:
        model = build()
        model.get_parameter("0.weight").register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
        return model

    with pytest.raises(ravnest.TraceError, match=r"the gradient of 0\.weight differs"):
        ravnest.Job(wrong, nn.functional.mse_loss, [batch()]).train(steps=1, run_dir=tmp_path, show=shown)
    assert any("too big for the free memory" in text for text in shown.texts)
    assert not list(tmp_path.iterdir())
