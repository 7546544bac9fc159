"""The environment of `make setup` runs users' jobs: the libraries they import, in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import torchvision.models
from sklearn.datasets import load_digits
gpt = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
print(tuple(gpt(torch.zeros(2, 8, dtype=torch.int64)).logits.shape))
torchvision.models.resnet50()
print(tuple(torchvision.models.resnet18()(torch.zeros(2, 3, 32, 32)).shape))
print(load_digits().data.shape)
"""


def test_a_fresh_interpreter_runs_the_models_of_users(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, cwd=tmp_path)
    assert done.returncode == 0, f"run `make setup` again: {done.stderr}"
    assert done.stdout.splitlines() == ["(2, 8, 32)", "(2, 1000)", "(1797, 64)"]
