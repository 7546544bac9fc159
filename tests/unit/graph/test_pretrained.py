"""Weights from folders of safetensors files: names, dtypes and every kind of file that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    PreTrainedConfig,
)

import ravnest
from ravnest.errors import WeightsError
from ravnest.graph import Program, legal_cuts, split, trace
from ravnest.graph.pretrained import Pretrained, pretrained
from ravnest.graph.verify import verify
from ravnest.graph.weights import read_weights, start_tensors
from ravnest.run.checkpoint.start import StartWeights
from tests.sampling import only

GPT2 = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0)
LLAMA = LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=50, max_position_embeddings=32,
)  # fmt: skip
IDS = torch.arange(32).reshape(4, 8) % 50
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}


def built(config: PreTrainedConfig) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def saved(folder: Path, config: PreTrainedConfig, **options: Any) -> Path:
    torch.manual_seed(7)
    built(config).save_pretrained(folder, **options)  # type: ignore[operator]
    return folder


def started(program: Program, seed: int = 0) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in start_tensors(program, (*program.state, *program.idle), seed)
        if not name.startswith("constant.")
    }


def assert_same(tensors: dict[str, Tensor], model: nn.Module) -> None:
    own = {**model.state_dict(), **dict(model.named_buffers())}
    assert tensors
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, own[name])] == []


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda c: c.model_type)
@pytest.mark.parametrize("shards", ["5GB", "5KB"])
def test_stages_start_as_from_pretrained(config: PreTrainedConfig, shards: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", config, max_shard_size=shards)
    assert (folder / "model.safetensors.index.json").exists() == (shards == "5KB")
    model = pretrained(folder, lambda: built(config))
    program = trace(model, None, BATCH)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    legal = legal_cuts(program)
    start, seen = StartWeights(program, 0), set[str]()
    for stage in split(program, [legal[len(legal) // 3], legal[2 * len(legal) // 3]]):
        assert stage.init is None
        assert start.write_stage(stage, tmp_path / "weights", frozen_only=False)
        tensors = read_weights(stage, tmp_path / "weights")
        assert tensors.keys() == {s.target for s in stage.state if s.owner == stage.index}
        assert_same({n: t for n, t in tensors.items() if not n.startswith("constant.")}, expected)
        seen |= tensors.keys()
    assert seen == {s.target for s in program.state}
    assert program.pretrained is not None
    assert program.pretrained.notes == ()
    assert verify(program, model, None, program.feed(BATCH), seed=0).largest_difference < 1e-6


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = built(GPT2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, **inputs: Tensor) -> Tensor:
        loss: Tensor = self.lm(**inputs).loss * self.scale
        return loss


def rename(folder: Path, change: Callable[[str], str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({change(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda name: name,
        lambda name: name.removeprefix("transformer."),
        lambda name: "lm_head.weight" if name == "transformer.wte.weight" else name,
        lambda name: f"lm.{name}",
    ],
    ids=["own names", "without prefix", "stored under the tied name", "as a part"],
)
@pytest.mark.parametrize("wrapped", only([True], [False, True]))
def test_names_differ_as_they_do_in_practice(change: Callable[[str], str], wrapped: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, GPT2)
    expected = load_file(folder / "model.safetensors")
    rename(folder, change)
    if change("x") == "lm.x" and not wrapped:
        with pytest.raises(WeightsError, match=r"has no tensor of this model: it has lm\.transformer"):
            trace(pretrained(folder, lambda: built(GPT2)), None, BATCH)
        return
    builder: Callable[[], nn.Module] = Wrapped if wrapped else lambda: built(GPT2)
    if wrapped:
        with pytest.raises(WeightsError, match=r"lacks scale: give missing='initialise'"):
            trace(pretrained(folder, builder), None, BATCH)
    program = trace(pretrained(folder, builder, missing="initialise"), None, BATCH)
    tensors = {name.removeprefix("lm."): tensor for name, tensor in started(program).items()}
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, tensors[name])] == []


def test_a_base_model_is_read_from_a_file_with_its_prefix(tmp_path: Path) -> None:
    folder = saved(tmp_path, GPT2)
    model = pretrained(folder, lambda: GPT2Model(GPT2))
    program = trace(model, lambda output, target: (output[0] - target).square().mean(), (IDS, torch.zeros(4, 8, 16)))
    assert_same(started(program), GPT2Model.from_pretrained(folder))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", only([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_dtypes_are_those_of_the_builder(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(7)
    built(LLAMA).to(stored).save_pretrained(tmp_path)  # type: ignore[operator]
    program = trace(pretrained(tmp_path, lambda: built(LLAMA).to(wanted)), None, BATCH)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=wanted)
    trainable = {s.target for s in program.state if s.trainable}
    tensors = {name: tensor for name, tensor in started(program).items() if name in trainable}
    assert {tensor.dtype for tensor in tensors.values()} == {wanted}
    assert_same(tensors, expected)


def test_a_new_head_is_initialised_on_request(tmp_path: Path) -> None:
    folder = saved(tmp_path, GPT2)
    config = GPT2Config(**{**GPT2.to_dict(), "num_labels": 3, "pad_token_id": 0})
    batch = {"input_ids": IDS, "labels": torch.zeros(4, dtype=torch.int64)}

    def builder() -> nn.Module:
        model: nn.Module = AutoModelForSequenceClassification.from_config(config)
        return model

    with pytest.raises(WeightsError, match=r"lacks score\.weight: give missing='initialise' to let the builder"):
        trace(pretrained(folder, builder), None, batch)
    program = trace(pretrained(folder, builder, missing="initialise"), None, batch)
    assert program.pretrained is not None
    assert program.pretrained.initialised == ("score.weight",)
    assert "lacks them: score.weight" in program.pretrained.notes[0]
    tensors = started(program, seed=1)
    assert tensors["score.weight"].std() > 0.005
    assert torch.equal(tensors["score.weight"], started(program, seed=1)["score.weight"])
    assert not torch.equal(tensors["score.weight"], started(program, seed=2)["score.weight"])


class Small(nn.Module):
    """A part whose initial value depends on another parameter, and a buffer."""

    scale: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.Parameter(self.inner.weight.detach().t().norm(dim=0))
        self.noise = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.to(self.norm.dtype)) * self.norm * self.scale + self.noise
        return y


EXAMPLE = (torch.ones(4, 4), torch.zeros(4, 4))


def small(folder: Path, changes: dict[str, Tensor | None] | None = None) -> Path:
    """A folder with the linear layer of `Small` and some changes."""
    torch.manual_seed(3)
    inner = nn.Linear(4, 4)
    tensors: dict[str, Tensor | None] = {f"inner.{n}": t for n, t in inner.state_dict().items()} | (changes or {})
    folder.mkdir(exist_ok=True)
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")
    return folder


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def test_new_parameters_are_computed_from_loaded_ones(tmp_path: Path) -> None:
    model = pretrained(small(tmp_path), Small, missing="initialise")
    tensors = started(trace(model, loss, EXAMPLE), seed=5)
    weight = load_file(tmp_path / "model.safetensors")["inner.weight"]
    assert torch.equal(tensors["inner.weight"], weight)
    assert torch.equal(tensors["norm"], weight.t().norm(dim=0))
    torch.manual_seed(5)
    assert torch.equal(tensors["noise"], torch.randn(4)), "no random numbers are drawn for loaded parameters"
    assert torch.equal(tensors["scale"], torch.full((4,), 2.0)), "a missing buffer keeps its value"
    late = pretrained(tmp_path, lambda: Small(torch.float64), missing="initialise")
    with pytest.raises(ravnest.TraceError, match="the builder computes norm from initial values in another dtype"):
        trace(late, loss, EXAMPLE)


def traced(folder: Path, missing: Any = "initialise") -> Program:
    program = trace(Pretrained(folder, Small, missing), loss, EXAMPLE)
    assert program.pretrained is not None
    program.pretrained.check_values(program.state)
    return program


def test_tensors_that_the_model_does_not_have_are_one_line(tmp_path: Path) -> None:
    program = traced(small(tmp_path, {f"extra.{i}": torch.zeros(1) for i in range(5)}))
    assert program.pretrained is not None
    (missing, extra) = program.pretrained.notes
    assert missing.endswith("lacks them: norm, noise")
    assert extra.endswith("has tensors that the model does not have: extra.0, extra.1, extra.2 and 2 more")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"inner.weight": torch.zeros(4, 5)}, r"inner\.weight has shape \[4, 5\], the model needs \[4, 4\]"),
        ({"inner.bias": torch.zeros(4, dtype=torch.int8)}, r"inner\.bias is int8, the model needs float32"),
        ({"inner.bias": torch.zeros(4).to(torch.float8_e4m3fn)}, r"inner\.bias is F8_E4M3, the model needs float32"),
        ({"inner.bias": torch.tensor([0.0, torch.nan, 0, 0])}, r"inner\.bias has values that are not finite"),
        ({"inner.bias": torch.full((4,), 1e300, dtype=torch.float64)}, r"not finite in float32: choose another"),
        (
            {"inner.weight": None, "inner.bias": None, "other": torch.zeros(2)},
            "has no tensor of this model: it has oth",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_a_sentence(
    changes: dict[str, Tensor | None], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=sentence):
        traced(small(tmp_path, changes))


def index(folder: Path, weight_map: Any) -> None:
    small(folder).joinpath("model.safetensors").rename(folder / "a.safetensors")
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


WEIGHT, BIAS = {"inner.weight": "a.safetensors"}, {"inner.bias": "a.safetensors"}


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({**WEIGHT, "inner.bias": "b.safetensors"}, r"lacks b\.safetensors, which .* names: it has 2 shards"),
        ({**WEIGHT, "inner.bias": "../secret.safetensors"}, "is not the name of a file in"),
        ({**WEIGHT, "inner.bias": "/etc/passwd"}, "is not the name of a file in"),
        ({**WEIGHT, "inner.bias": ".."}, "is not the name of a file in"),
        ({**WEIGHT, **BIAS, "inner.more": "a.safetensors"}, r"a\.safetensors lacks inner\.more, which .* says it has"),
        ("{", "is not an index of safetensors files"),
        ("{}", "is not an index of safetensors files"),
        ('{"weight_map": 3}', "is not an index of safetensors files"),
    ],
)
def test_indexes_that_do_not_fit_are_a_sentence(weight_map: Any, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(small(tmp_path / "x").joinpath("model.safetensors").read_bytes())
    index(tmp_path / "folder", weight_map)
    with pytest.raises(WeightsError, match=sentence):
        traced(tmp_path / "folder")


def test_a_good_index_is_read(tmp_path: Path) -> None:
    index(tmp_path, {**WEIGHT, **BIAS})
    assert "inner.weight" in started(traced(tmp_path))


def test_folders_that_do_not_fit_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"nowhere is not a directory: give one with model\.safetensors or"):
        traced(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        traced(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="has pickled weights only, which can run code and are not read"):
        traced(tmp_path)
    path = small(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsError, match=r"model\.safetensors is not a safetensors file that can be read"):
        traced(tmp_path)


def test_tied_parameters_with_two_values_are_a_sentence(tmp_path: Path) -> None:
    folder = saved(tmp_path, GPT2)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()}, folder / "model.safetensors")
    program = trace(pretrained(folder, lambda: built(GPT2)), None, BATCH)
    assert program.pretrained is not None
    program.pretrained.check_values(program.state)
    save_file({**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"different values for .*\.weight and .*\.weight, which the model ties"):
        program.pretrained.check_values(program.state)


def test_a_file_that_is_replaced_meanwhile_is_a_sentence(tmp_path: Path) -> None:
    program = traced(small(tmp_path))
    save_file({"inner.weight": torch.zeros(9), "inner.bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="has changed since the job started"):
        started(program)


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got a model: pass a model to Job"):
        ravnest.pretrained(tmp_path, nn.Linear(1, 1))
    with pytest.raises(ValueError, match="builder must be a function that builds the model, got a int"):
        ravnest.pretrained(tmp_path, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="missing must be 'error' or 'initialise', got 'ignore'"):
        ravnest.pretrained(tmp_path, Small, missing="ignore")  # type: ignore[arg-type]
