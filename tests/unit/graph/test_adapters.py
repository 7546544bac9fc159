"""Adapters of peft: traced exactly, initialised as after `from_pretrained`, exported for peft and merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config

from ravnest.errors import RavnestError, TraceError, WeightsError
from ravnest.graph import Program, legal_cuts, split, trace
from ravnest.graph.pretrained import pretrained
from ravnest.graph.verify import verify
from ravnest.graph.weights import start_tensors
from ravnest.run.checkpoint.export import export
from tests.sampling import every

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about tied embeddings

GPT2 = GPT2Config(
    n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
TASK = {"task_type": "CAUSAL_LM"}
IDS = torch.arange(32).reshape(4, 8) % 50
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn", "c_fc"], **TASK),
    "lora, biases": lambda: peft.LoraConfig(r=2, bias="all", target_modules=["c_attn"], **TASK),
    "lora, tied embedding": lambda: peft.LoraConfig(r=2, target_modules=["wte", "c_attn"], **TASK),
    "lora, tied head": lambda: peft.LoraConfig(r=2, target_modules=["lm_head", "c_attn"], **TASK),
    "dora, new head": lambda: peft.LoraConfig(
        r=2, use_dora=True, target_modules=["c_attn"], modules_to_save=["lm_head"], **TASK
    ),
    "ia3": lambda: peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], **TASK),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **TASK),
}


def base() -> Any:
    """A model with a configuration of its own: peft changes it."""
    return AutoModelForCausalLM.from_config(copy.deepcopy(GPT2))


def adapted(name: str) -> Any:
    return peft.get_peft_model(base(), ADAPTERS[name]())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint."""
    path = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(7)
    base().save_pretrained(path, max_shard_size="5KB")
    return path


@pytest.mark.parametrize("name", every(2, ADAPTERS))
def test_an_adapter_trains_exactly_on_pretrained_weights(name: str, folder: Path) -> None:
    model = pretrained(folder, lambda: adapted(name))
    program = trace(model, None, BATCH)
    torch.manual_seed(3)
    expected = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), ADAPTERS[name]())
    own = {**expected.state_dict(), **dict(expected.named_buffers())}
    legal = legal_cuts(program)
    for stage in split(program, [legal[len(legal) // 2]]):  # each stage draws its own tensors alone
        for target, tensor in start_tensors(program, [s for s in stage.state if s.owner == stage.index], seed=3):
            assert target.startswith("constant.") or torch.equal(tensor, own[target]), target
        assert all(s.trainable for s in stage.borrowed), "frozen tied parameters are not sent at every step"
    trained = {program.ties.get(n, n) for n, p in expected.named_parameters() if p.requires_grad}
    assert {s.target for s in program.state if s.trainable} == trained
    assert verify(program, model, None, program.feed(BATCH), seed=3).is_exact


def exported(program: Program, run: Path, name: str) -> None:
    """Write the run of a trained adapter: its final model and its job file."""
    tensors = {s.target: program.tensors[s.target].detach() for s in (*program.state, *program.idle) if s.persistent}
    metadata = {"ties": json.dumps(dict(program.ties)), "step": "1"}
    save_file({n: t.contiguous().clone() for n, t in tensors.items()}, run / "model.safetensors", metadata)
    (run / "job.py").write_text(
        "import ravnest\nfrom tests.unit.graph.test_adapters import BATCH, adapted\n"
        f"job = ravnest.Job(model=lambda: adapted({name!r}), loss=None, data=[BATCH])\n"
    )
    (run / "job.txt").write_text(str(run / "job.py"))


def trained_model(name: str) -> Any:
    torch.manual_seed(1)
    model = adapted(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        values: Tensor = model.eval()(**BATCH).logits
    return values


@pytest.mark.parametrize("name", every(2, ADAPTERS, first=1))
def test_adapter_and_merged_model_are_read_by_their_libraries(name: str, tmp_path: Path) -> None:
    model = trained_model(name)
    exported(trace(model, None, BATCH), tmp_path, name)
    assert "the adapter of the final model" in export(tmp_path, str(tmp_path / "adapter"))
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    torch.manual_seed(1)
    read = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert torch.equal(logits(read), logits(model))
    if name in ("prompt", "prefix"):
        with pytest.raises(RavnestError, match="cannot be merged: export without --merge"):
            export(tmp_path, str(tmp_path / "merged"), merge=True)
        return
    export(tmp_path, str(tmp_path / "merged"), merge=True, max_shard_size="10kB")
    assert (tmp_path / "merged" / "model.safetensors.index.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged) - logits(model)).abs().max() < 1e-5
    if "tied" not in name:  # peft merges adapters of tied embeddings into both of them
        assert torch.equal(logits(merged), logits(model.merge_and_unload()))


def test_trained_parameters_outside_the_adapter_are_not_lost(tmp_path: Path) -> None:
    def also_trains_a_norm(name: str) -> Any:
        model = peft.get_peft_model(base(), ADAPTERS[name]())
        model.base_model.model.transformer.ln_f.weight.requires_grad_()
        return model

    exported(trace(also_trains_a_norm("lora"), None, BATCH), tmp_path, "lora")
    job = (tmp_path / "job.py").read_text()
    line = "model.base_model.model.transformer.ln_f.weight.requires_grad_()"
    (tmp_path / "job.py").write_text(
        job.replace("job = ", f"def more():\n    model = adapted('lora')\n    {line}\n    return model\njob = ")
        .replace("lambda: adapted('lora')", "more")
    )  # fmt: skip
    with pytest.raises(RavnestError, match=r"ln_f\.weight was trained and is not part of the adapter: .*--merge"):
        export(tmp_path, str(tmp_path / "adapter"))
    assert "merged model" in export(tmp_path, str(tmp_path / "merged"), merge=True)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            lambda: peft.AdaLoraConfig(r=2, target_modules=["c_attn"], total_step=9, **TASK),
            "not on the list of allowed",
        ),
        (lambda: peft.VeraConfig(r=2, target_modules=["c_attn"], **TASK), "outside torch's generator"),
    ],
    ids=["adalora", "vera"],
)
def test_adapters_that_cannot_train_are_a_sentence(config: Callable[[], Any], sentence: str, folder: Path) -> None:
    def builder() -> nn.Module:
        model: nn.Module = peft.get_peft_model(base(), config())
        return model

    with pytest.raises(TraceError, match=sentence):
        trace(pretrained(folder, builder), None, BATCH)
    with pytest.raises(TraceError, match=sentence):
        split(trace(builder, None, BATCH), [])


def test_missing_base_weights_are_not_taken_for_adapters(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in folder.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    del index["weight_map"]["transformer.h.1.attn.c_attn.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"lacks base_model\.model\.transformer\.h\.1\.attn\.c_attn\.base_layer"):
        trace(pretrained(tmp_path, lambda: adapted("lora")), None, BATCH)
