"""A run's weights for use elsewhere: the model's own names, tied ones too, and folders that `transformers` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ravnest
from benchmarks import zoo
from ravnest.cli.main import app
from ravnest.errors import WeightsError
from ravnest.graph import Program, legal_cuts, split, trace
from ravnest.pipeline.state import StageState, trained, write_state
from ravnest.run.checkpoint.export import export
from ravnest.run.checkpoint.format import Draft, Manifest, fingerprint
from ravnest.run.checkpoint.start import StartWeights, frozen_state

CASES: dict[str, Callable[[], zoo.Case]] = {
    "gpt tied": lambda: zoo.gpt(tied=True, layers=2, width=16, heads=2),
    "gpt2": lambda: zoo.gpt2(n_layer=1, n_embd=16, n_head=2),
}
GPT2_JOB = """
import ravnest
from benchmarks import zoo
case = zoo.gpt2(n_layer=1, n_embd=16, n_head=2)
job = ravnest.Job(model=case.build, loss=case.loss, data=[case.batch(2)])
"""


def program_of(name: str) -> Program:
    case = CASES[name]()
    torch.manual_seed(1)
    return trace(case.build(), case.loss, case.batch(2))


def weights(program: Program, step: int) -> dict[str, Tensor]:
    """Weights that a model might have after `step` steps."""
    kept = {s.target: program.tensors[s.target].detach() for s in (*program.state, *program.idle)}
    frozen = {s.target for s in frozen_state(program)}
    return {name: tensor if name in frozen else tensor + step for name, tensor in kept.items()}


def checkpoint(run: Path, program: Program, step: int) -> None:
    """As stages in two halves have saved it."""
    legal = legal_cuts(program)
    draft, expected = Draft(run, step, step), weights(program, step)
    for stage in split(program, [legal[len(legal) // 2]]):
        own = {f"weights/{name}": expected[name] for name in trained(stage)}
        write_state(StageState(step, {**own, "optimizer/exp_avg/x": torch.zeros(2)}), draft.stage(stage.index))
    names = tuple(s.target for s in (*program.state, *program.idle) if s.persistent)
    frozen = StartWeights(program, 0).write_frozen(run)
    draft.complete(
        Manifest(
            step=step, batches=step, seed=0, program=fingerprint(program), optimizer=ravnest.AdamW(), names=names,
            ties=dict(program.ties), cuts=(), accumulate=1, depths=(1,), delays=(0,), frozen=frozen,
        )
    )  # fmt: skip


def final_model(run: Path, program: Program, step: int) -> None:
    persistent = {s.target for s in (*program.state, *program.idle) if s.persistent}
    tensors = {name: tensor.contiguous() for name, tensor in weights(program, step).items() if name in persistent}
    save_file(tensors, run / "model.safetensors", {"ties": json.dumps(dict(program.ties)), "step": str(step)})


def assert_is(tensors: dict[str, Tensor], program: Program, model: nn.Module, step: int) -> None:
    model.load_state_dict(tensors, strict=True)
    expected = weights(program, step)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[program.ties.get(name, name)]), name


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_models_own_names(name: str, tmp_path: Path) -> None:
    program, model = program_of(name), CASES[name]().build()
    checkpoint(tmp_path, program, 3)
    said = export(tmp_path, str(tmp_path / "new" / "model.safetensors"))
    assert said.startswith("wrote the checkpoint step-000003, ")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    assert tensors.keys() == model.state_dict().keys(), "tied names included"
    assert program.ties
    assert_is(tensors, program, model, 3)


def test_whichever_has_seen_more_steps(tmp_path: Path) -> None:
    program = program_of("gpt tied")
    for step, at in ((5, "checkpoint"), (7, "model"), (9, "checkpoint")):
        (checkpoint if at == "checkpoint" else final_model)(tmp_path, program, step)
        said = export(tmp_path, str(tmp_path / "out.safetensors"))
        assert said.startswith("wrote the checkpoint step" if at == "checkpoint" else "wrote the final model")
        assert_is(load_file(tmp_path / "out.safetensors"), program, CASES["gpt tied"]().build(), step)
    said = export(tmp_path / "checkpoints" / "step-000005", str(tmp_path / "out.safetensors"))
    assert "after 5 steps" in said


@pytest.mark.parametrize("knows", [True, False])
def test_a_folder_is_read_by_transformers(knows: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    program = program_of("gpt2")
    checkpoint(tmp_path, program, 2)
    job = tmp_path / "job.py"
    job.write_text(GPT2_JOB)
    if knows:
        (tmp_path / "job.txt").write_text(f"{job}\n")
    export(tmp_path, str(tmp_path / "folder"), None if knows else job)
    assert {p.name for p in (tmp_path / "folder").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.lm_head.weight is model.transformer.wte.weight
    expected = weights(program, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[program.ties.get(name, name)]), name


def test_what_cannot_be_exported_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no model\.safetensors, and .* has no usable checkpoint"):
        export(tmp_path, str(tmp_path / "x.safetensors"))
    checkpoint(tmp_path, program_of("gpt tied"), 1)
    with pytest.raises(ValueError, match="give the job file with --job"):
        export(tmp_path, str(tmp_path / "folder"))
    job = tmp_path / "job.py"
    job.write_text(GPT2_JOB)
    with pytest.raises(ValueError, match="the job's model is not that of the run: only the "):
        export(tmp_path, str(tmp_path / "folder"), job)
    job.write_text(GPT2_JOB.replace("model=case.build", "model=zoo.gpt().build"))
    with pytest.raises(ValueError, match="GPT has no configuration that `transformers` could read"):
        export(tmp_path, str(tmp_path / "folder"), job)
    assert not (tmp_path / "folder").exists()


def test_by_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    checkpoint(tmp_path, program_of("gpt tied"), 4)
    done = CliRunner().invoke(app, ["export", str(tmp_path), "--to", str(tmp_path / "out.safetensors")])
    assert done.exit_code == 0, done.output
    assert "after 4 steps" in done.output
    assert len(load_file(tmp_path / "out.safetensors")) > 20
