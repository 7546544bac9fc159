"""The models of the benchmark, their data and the PCs that train them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import ravnest
from ravnest.examples.text import batches, library_text
from testbed import HostSpec, Topology

REQUESTER = "requester"
_VOCABULARY = 32_000


@dataclass(frozen=True)
class Size:
    """A Llama, its batches, and the PCs: `cpu` cores each, so that all together have two."""

    name: str
    width: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    samples: int
    length: int
    pcs: int
    steps: int
    lr: float

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"pc-{i}" for i in range(self.pcs))

    def topology(self, memory_bytes: int) -> Topology:
        """PCs with a memory limit and a CPU quota each, enforced by the kernel, and the requester without limits."""
        cpu = 1.8 / self.pcs
        pcs = (HostSpec(name=name, cpu=cpu, memory_bytes=memory_bytes) for name in self.hosts)
        return Topology(hosts=(HostSpec(name=REQUESTER), *pcs))

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=self.width, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.key_value_heads,
            max_position_embeddings=self.length, use_cache=False,
        )  # fmt: skip

    def example(self) -> Tensor:
        return next(batches(library_text(), 1, self.length, seed=1))[0]


SIZES = {
    size.name: size
    for size in (
        Size("1.1B", 2048, 5632, 22, 32, 4, samples=4, length=64, pcs=8, steps=20, lr=2e-4),
        Size("small", 256, 704, 6, 4, 2, samples=4, length=64, pcs=4, steps=6, lr=1e-3),
    )
}


class _Text:
    """Random windows of text, as inputs of a Llama that computes its own loss."""

    def __init__(self, size: Size) -> None:
        self._size = size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for inputs, _ in batches(library_text(), self._size.samples, self._size.length, seed=0):
            yield {"input_ids": inputs, "labels": inputs}


def make_job(name: str, *, folder: str = "") -> ravnest.Job:
    """Train a Llama from random weights; with `folder`, fine-tune the one in that directory by LoRA."""
    size = SIZES[name]
    model: Any = (lambda: LlamaForCausalLM(size.config())) if not folder else _adapted(size, Path(folder))
    return ravnest.Job(
        model=model, loss=None, data=_Text(size), optimizer=ravnest.AdamW(size.lr, weight_decay=0.0), name="real_size",
        config=ravnest.TrainingConfig(microbatches_per_step=size.samples),
    )  # fmt: skip


def _adapted(size: Size, folder: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    def build() -> nn.Module:
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        adapted: nn.Module = get_peft_model(LlamaForCausalLM(size.config()), lora)
        return adapted

    return ravnest.pretrained(folder, build)


def num_parameters(size: Size) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(size.config()).parameters())
