"""Fine-tuning from a sharded folder with LoRA, with real processes: the same bits as plain PyTorch, little traffic."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig

import ravnest
from ravnest.coordinator.journal import replay
from ravnest.run.checkpoint.export import export
from ravnest.run.checkpoint.format import checkpoints_in

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore::UserWarning:peft.*")]

GPT2 = GPT2Config(
    n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
UNTIED = GPT2Config(**{**GPT2.to_dict(), "tie_word_embeddings": False})  # gradients of tied weights are summed later
STEPS = 6
JOB = """
import ravnest
from tests.integration.test_fine_tune import GPT2, adapted, batches
from transformers import AutoModelForCausalLM
job = ravnest.Job(
    model=ravnest.pretrained({folder!r}, lambda: adapted(AutoModelForCausalLM.from_config(GPT2))), loss=None,
    data=batches(),
)
"""


def adapted(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    wrapped: nn.Module = peft.get_peft_model(model, config)
    return wrapped


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 50, (4, 8), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": x, "labels": x} for x in ids]


def saved(folder: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="10KB")
    return folder


def plain(model: nn.Module, steps: int) -> nn.Module:
    """Train with plain PyTorch, two microbatches per step."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for batch in batches()[:steps]:
        optimizer.zero_grad()
        for part in range(2):
            (model(**{k: v[2 * part : 2 * part + 2] for k, v in batch.items()}).loss * 0.5).backward()
        optimizer.step()
    return model


def differing(run: ravnest.Run, model: nn.Module) -> list[str]:
    trained = run.state_dict()
    assert trained.keys() == model.state_dict().keys()
    return [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, trained[name])]


def train(model: Any, folder: Path, data: Any = None, **changes: Any) -> ravnest.Run:
    job = ravnest.Job(model=model, loss=None, data=data or batches(), optimizer=ravnest.AdamW(1e-2))
    settings = {"on": "local:2", "mode": "sync", "microbatches_per_step": 2, "run_dir": folder, **changes}
    return job.train(**settings)


def test_lora_from_a_folder_checkpoints_resumes_and_exports(tmp_path: Path) -> None:
    folder, run_dir = saved(tmp_path / "pretrained", GPT2), tmp_path / "run"
    model = ravnest.pretrained(folder, lambda: adapted(AutoModelForCausalLM.from_config(GPT2)))

    def reference(steps: int) -> Any:
        torch.manual_seed(0)
        return plain(adapted(AutoModelForCausalLM.from_pretrained(folder)), steps)

    assert differing(train(model, run_dir, steps=4, checkpoint_every=2), reference(4)) == []
    resumed = train(model, None, resume=run_dir, steps=STEPS, checkpoint_every=2)  # type: ignore[arg-type]
    expected = reference(STEPS)
    assert differing(resumed, expected) == []

    trained = {n for n, p in expected.named_parameters() if p.requires_grad}
    stored = checkpoints_in(run_dir)
    steps = [checkpoint.step for checkpoint in stored]
    assert steps[-1] == 6
    assert set(steps) <= {2, 4, 6}, "one is left out while the last is being written"
    frozen = {checkpoint.manifest.frozen for checkpoint in stored}
    assert len(frozen) == 1, "frozen weights are stored once"
    trained_bytes = sum(p.numel() * 4 for p in expected.parameters() if p.requires_grad)
    for checkpoint in stored:
        state = checkpoint.manifest.files
        assert {entry.rpartition("/")[2] for file in state for entry in file.tensors} == trained
        headers = 1000 * len(state) * len(trained)
        assert sum(file.num_bytes for file in state) < 3 * trained_bytes + headers

    (tmp_path / "job.py").write_text(JOB.format(folder=str(folder)))
    export(run_dir, str(tmp_path / "adapter"), tmp_path / "job.py")
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert config.base_model_name_or_path == str(folder)
    with torch.no_grad():
        assert torch.equal(read.eval()(**batches()[0]).logits, expected.eval()(**batches()[0]).logits)
    (run_dir / "model.safetensors").unlink()
    assert "the checkpoint step-000006" in export(run_dir, str(tmp_path / "whole.safetensors"))


def test_all_parameters_from_a_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pretrained", UNTIED)
    model = ravnest.pretrained(folder, lambda: AutoModelForCausalLM.from_config(UNTIED))
    run = train(model, tmp_path / "run", steps=3)
    assert differing(run, plain(AutoModelForCausalLM.from_pretrained(folder), 3)) == []


class KillsAWorker:
    """Batches; before one of them a worker of this process is killed."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __iter__(self) -> Iterator[Any]:
        for number in range(1000):
            if number == self._at:
                workers = [worker for server in psutil.Process().children() for worker in server.children()]
                max(workers, key=lambda process: process.create_time()).kill()
            yield batches()[number % STEPS]


@pytest.mark.parametrize("kind", ["model", "folder"])
def test_a_lost_node_gets_its_frozen_weights_again(kind: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "pretrained", GPT2)
    torch.manual_seed(0)
    instance = adapted(AutoModelForCausalLM.from_pretrained(folder))
    model: Any = instance
    if kind == "folder":
        model = ravnest.pretrained(folder, lambda: adapted(AutoModelForCausalLM.from_config(GPT2)))
    run = train(
        model, tmp_path / "run", KillsAWorker(12), steps=24, checkpoint_every=4, mode="async", verify=kind == "model"
    )
    tensors = run.state_dict()
    for name, parameter in instance.named_parameters():
        assert torch.equal(parameter, tensors[name]) != parameter.requires_grad, name
    assert run.losses
    assert all(map(isfinite, run.losses))
    state, _ = replay(tmp_path / "run" / "coordinator" / "journal")
    assert len(state.clusters) == 2, "the cluster was formed again"
