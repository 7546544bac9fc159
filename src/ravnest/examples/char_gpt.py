"""Train a small GPT on the source of Python's standard library, and print a sample of its output.

ravnest train char_gpt.py --local 3 --steps 300
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import ravnest
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import Bytes, batches, decode, library_text

CONFIG = GPTConfig(vocab=256, context=64, layers=4, width=128, heads=4, dropout=0.0)
BATCH = 24

_text = library_text()
_split = len(_text) * 9 // 10
TEXT, HELD_OUT_TEXT = _text[:_split], _text[_split:]


class TextWindows:
    """Random windows of a text; every iteration yields the same sequence."""

    def __init__(self, text: Tensor, seed: int, size: int = BATCH) -> None:
        self.text, self.seed, self.size = text, seed, size

    def __iter__(self) -> Iterator[Any]:
        return batches(self.text, self.size, CONFIG.context, self.seed)


job = ravnest.Job(
    model=lambda: GPT(CONFIG),
    loss=next_token_loss,
    optimizer=ravnest.AdamW(2e-3, schedule=ravnest.lr.constant(warmup_steps=20)),
    data=TextWindows(TEXT, seed=0),
    validation=TextWindows(HELD_OUT_TEXT, seed=1),
    name="char_gpt",
    tokenizer=Bytes(),
    config=ravnest.TrainingConfig(steps=300, on="local:3"),
)


def write(weights: Mapping[str, Tensor], prompt: str = "def ", length: int = 200) -> str:
    """Sample a text from the trained model."""
    model = GPT(CONFIG).eval()
    model.load_state_dict(dict(weights))
    ids = torch.tensor([list(prompt.encode())])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(length):
            logits = model(ids[:, -CONFIG.context :])[0, -1]
            ids = torch.cat([ids, torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)[None]], 1)
    return decode(ids[0])


def after(run: ravnest.Run) -> str:
    """Text that `ravnest train` prints at the end."""
    return write(run.state_dict())
