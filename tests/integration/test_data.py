"""Runs on data as users have it: mappings of varying length, ragged batches, loaders with worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BatchEncoding

import ravnest
from ravnest.config import TrainingConfig
from ravnest.run.metrics import ProgressView

pytestmark = pytest.mark.slow

IGNORED, MAX_LENGTH = -100, 24


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(30, 16), nn.Parameter(torch.randn(MAX_LENGTH, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        result: Tensor = self.head(self.layer(x, src_key_padding_mask=attention_mask == 0))
        return result


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def num_tokens(batch: tuple[Any, Tensor]) -> Tensor:
    return (batch[1] != IGNORED).sum(1)


def encoding(samples: int, length: int) -> BatchEncoding:
    generator = torch.Generator().manual_seed(samples * 100 + length)
    ids = torch.randint(0, 30, (samples, length), generator=generator)
    lengths = torch.randint(1, length + 1, (samples, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, IGNORED)})


class Messages(ProgressView):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def test_ragged_batches_of_varying_length_train_as_plain_pytorch(tmp_path: Path) -> None:
    """Smaller and larger than the first, of one sample, of other lengths, each loss a mean over tokens."""
    count, seen = 3, Messages()
    data = [encoding(*size) for size in ((7, 6), (7, 11), (3, 8), (10, 24), (1, 5), (2, 2))]
    torch.manual_seed(3)
    model = Tagger()
    job = ravnest.Job(model, token_mean, data, optimizer=ravnest.SGD(0.1), weight=num_tokens)
    config = TrainingConfig(
        on="local:2", steps=8, mode="sync", microbatches_per_step=count, max_length=MAX_LENGTH, threads=1,
        run_dir=tmp_path / "run",
    )  # fmt: skip
    run = job.train(config, show=seen)
    assert [text for text in seen.texts if "start over" in text] == ["the data ended after 6 batches and start over"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in [*data, *data[:2]]:
        optimizer.zero_grad()
        labels, total = batch["labels"], int((batch["labels"] != IGNORED).sum())
        number = min(count, len(labels))
        keys = ("input_ids", "attention_mask", "labels")
        for ids, mask, targets in zip(*(batch[key].tensor_split(number) for key in keys), strict=True):
            loss = token_mean(model(ids, mask), targets)
            loss.backward(torch.tensor(int((targets != IGNORED).sum()) / total))  # type: ignore[no-untyped-call]
        optimizer.step()
    trained = run.state_dict()
    assert [n for n, t in model.state_dict().items() if not torch.equal(t, trained[n])] == []


LOADER = """
import ravnest, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = torch.Generator().manual_seed(0)
x = torch.randn(90, 8, generator=generator)
loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=16, num_workers=2, persistent_workers=PERSISTENT)
print("loading")
job = ravnest.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), loss=nn.functional.mse_loss, data=loader
)
"""


@pytest.mark.parametrize("is_persistent", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_loader_with_processes_leaves_none_after_ctrl_c(is_persistent: bool, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(LOADER.replace("PERSISTENT", str(is_persistent)))
    command = [sys.executable, "-m", "ravnest", "train", "job.py", "--local", "2", "--run-dir", "run"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    )
    metrics, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 90
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 12):  # two passes
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    processes = psutil.Process(running.pid).children(recursive=True)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: every process gets it
    output, errors = running.communicate(timeout=90)
    assert running.returncode == 0, errors
    assert "the run is in" in output
    assert load_file(tmp_path / "run" / "model.safetensors")
    assert not psutil.wait_procs(processes, timeout=30)[1], "still there"
