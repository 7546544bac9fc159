"""Copies of checkpoints behind a URL, and a run that resumes from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ravnest
from ravnest.errors import RavnestError
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.run.checkpoint.format import checkpoints_in
from ravnest.run.checkpoint.writer import fetch_checkpoint, is_url, upload_checkpoint

CONFIG = GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2, dropout=0.0)


def job() -> ravnest.Job:
    data = batches(library_text(), 6, 16, seed=0)
    return ravnest.Job(lambda: GPT(CONFIG), next_token_loss, data, optimizer=ravnest.AdamW(3e-3))


def checkpoint(folder: Path, step: int, content: str = "state") -> Path:
    path = folder / f"step-{step:06}"
    path.mkdir(parents=True)
    (path / "stage-0.safetensors").write_text(content)
    (path / "manifest.json").write_text("{}")
    return path


@pytest.mark.slow
def test_a_run_resumes_from_a_url(tmp_path: Path) -> None:
    url = (tmp_path / "elsewhere").as_uri()
    job().train(steps=2, on="local:2", run_dir=tmp_path / "first", checkpoint_every=2, checkpoint_to=url)
    job().train(steps=3, on="local:2", run_dir=tmp_path / "second", resume=url)
    (there,), here = checkpoints_in(tmp_path / "first"), checkpoints_in(tmp_path / "second")[0]
    assert (there.step, here.step) == (2, 2)


@pytest.mark.soak
def test_a_run_goes_on_from_a_url_bit_for_bit(tmp_path: Path) -> None:
    url = (tmp_path / "elsewhere").as_uri()
    whole = job().train(steps=8, on="local:2", run_dir=tmp_path / "whole")
    job().train(
        steps=4, on="local:2", run_dir=tmp_path / "first", checkpoint_every=2, keep_checkpoints=1, checkpoint_to=url
    )
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["step-000004"]
    second = job().train(steps=8, on="local:2", run_dir=tmp_path / "second", resume=url)
    assert checkpoints_in(tmp_path / "second")[0].step == 4
    ends, same = whole.state_dict(), second.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in ends.items())


def test_the_newest_that_is_complete_is_brought(tmp_path: Path) -> None:
    url = (tmp_path / "elsewhere").as_uri()
    for step in (100, 200, 1000000):
        upload_checkpoint(checkpoint(tmp_path / "here", step, f"after {step}"), url, keep=2)
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["step-000200", "step-1000000"]
    (tmp_path / "elsewhere" / "step-1000000" / "manifest.json").unlink()  # its sender was killed
    assert fetch_checkpoint(url, tmp_path / "run").name == "step-000200"
    assert (tmp_path / "run/checkpoints/step-000200/stage-0.safetensors").read_text() == "after 200"


def test_what_cannot_be_reached_is_said(tmp_path: Path) -> None:
    with pytest.raises(RavnestError, match="nosuch"):
        fetch_checkpoint("nosuch://bucket/run", tmp_path)
    with pytest.raises(RavnestError, match="elsewhere"):
        fetch_checkpoint((tmp_path / "elsewhere").as_uri(), tmp_path)
    assert is_url("s3://bucket/run")
    assert not is_url("runs/mine")
    assert not is_url(Path("C:/runs"))
    with pytest.raises(ValueError, match="must be a URL"):
        job().train(steps=2, on="local:2", run_dir=tmp_path / "run", checkpoint_every=1, checkpoint_to="elsewhere")
