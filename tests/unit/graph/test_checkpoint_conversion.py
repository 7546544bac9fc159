"""Checkpoints with other names and layouts than the model: experts one by one, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

from ravnest.errors import WeightsError
from ravnest.graph import trace
from ravnest.graph.pretrained import pretrained
from ravnest.graph.weights import start_tensors

MIXTRAL = MixtralConfig(
    hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    num_local_experts=11, vocab_size=50, max_position_embeddings=32,
)  # fmt: skip
BATCH = {"input_ids": torch.arange(32).reshape(4, 8), "labels": torch.arange(32).reshape(4, 8)}
PART = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"


def build() -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(MIXTRAL)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(7)
    build().save_pretrained(tmp_path / "model", max_shard_size="5KB")  # type: ignore[operator]
    names = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())["weight_map"]
    assert PART.format(10) in names, "experts are stored one by one"
    return tmp_path / "model"


def started(folder: Path) -> dict[str, Tensor]:
    program = trace(pretrained(folder, build), None, BATCH)
    assert program.pretrained is not None
    assert program.pretrained.notes == ()
    found = start_tensors(program, (*program.state, *program.idle), 0)
    return {name: tensor for name, tensor in found if not name.startswith("constant.")}


def assert_same(found: dict[str, Tensor], folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder)
    own = {**expected.state_dict(), **dict(expected.named_buffers())}
    assert {name for name, _ in expected.named_parameters()} <= found.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, own[name])] == []


def test_experts_are_merged_as_from_pretrained_does(folder: Path) -> None:
    assert_same(started(folder), folder)


def test_the_models_own_layout_loads_too(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text((folder / "config.json").read_text())
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "own/model.safetensors")
    assert_same(started(tmp_path / "own"), tmp_path / "own")


def edited(folder: Path, name: str, tensor: Tensor | None) -> Path:
    """The folder with another tensor, or without it."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    held = load_file(path)
    del held[name]
    if tensor is None:
        del index["weight_map"][name]
    else:
        held[name] = tensor
    save_file(held, path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("expert", "tensor", "reason"),
    [
        (3, None, r"lacks parts of model.layers.1.mlp.experts.gate_up_proj"),
        (10, torch.zeros(12, 7), "differ in shape or dtype"),
        (0, torch.zeros(12, 8, dtype=torch.float16), "differ in shape or dtype"),
    ],
)
def test_parts_that_do_not_fit_are_named(folder: Path, expert: int, tensor: Tensor | None, reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        started(edited(folder, PART.format(expert), tensor))
