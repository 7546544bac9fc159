"""Frozen parameters cost one copy: no gradient, no optimizer state, no part in states, averages and messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ravnest
from ravnest.coordinator.events import ClusterSpec
from ravnest.core.schedule import StageSchedule
from ravnest.graph import Program, measure_costs, split, trace
from ravnest.graph.interpreter import Interpreter, Tape
from ravnest.graph.shapes import fake_inputs
from ravnest.graph.timing import OpSeconds
from ravnest.graph.weights import open_weights, read_weights, stage_weights
from ravnest.pipeline.config import TrainerConfig, roles
from ravnest.pipeline.state import kind_and_name, trained, write_state
from ravnest.pipeline.trainer import Trainer
from ravnest.planner.fleet import Machine
from ravnest.run import plan as run_plan
from ravnest.run.checkpoint.start import StartWeights, frozen_state, gather
from ravnest.run.cluster_builder import ClusterBuilder
from ravnest.run.plan import chain_of
from tests.unit.pipeline.pipe import train

VOCAB, WIDTH = 40, 16


class Tied(nn.Module):
    """Embedding and head share a weight; between them are three blocks, and a normalisation with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.blocks(self.embed(x))))
        return y


PATTERNS: dict[str, Callable[[str], bool]] = {
    "last block": lambda name: name.startswith(("blocks.2", "norm")),
    "first block": lambda name: name.startswith("blocks.0"),
    "biases": lambda name: name.endswith("bias"),
    "head's bias": lambda name: name == "head.bias",
    "all": lambda name: True,
}


def model_of(pattern: str) -> Tied:
    torch.manual_seed(2)
    model = Tied()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(PATTERNS[pattern](name))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(8) * (step + 3) % VOCAB
    return ids, (ids + 1) % VOCAB


def program_of(pattern: str) -> Program:
    return trace(model_of(pattern), nn.functional.cross_entropy, batch(0))


def cuts_of(program: Program) -> list[int]:
    """After the first and the second block, and before the head."""
    ends = [i + 1 for i, op in enumerate(program.ops) if op.op.startswith("aten.tanh")]
    return [*ends[:2], len(program.ops) - 4]


CONFIG = TrainerConfig(optimizer=ravnest.AdamW(1e-2), correction=ravnest.staleness.none())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("recompute", [False, True])
def test_training_is_plain_pytorch_and_states_have_no_frozen_tensors(pattern: str, recompute: bool) -> None:
    program, model = program_of(pattern), model_of(pattern)
    cuts = cuts_of(program)
    config = TrainerConfig(optimizer=CONFIG.optimizer, correction=CONFIG.correction, recompute=recompute)
    rules = [StageSchedule(accumulate=1, depth=1, delay=0)] * (len(cuts) + 1)
    pipe = train(program, cuts, [batch(i) for i in range(4)], config, rules, save_at=4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = model.state_dict()
    differ = [n for n, t in pipe.weights.items() if not torch.allclose(t, expected[n], rtol=0, atol=1e-6)]
    assert differ == []
    changed = {s.target for s in program.state if s.trainable or s.mutated}
    parameters = {s.target for s in program.state if s.trainable}
    entries = [kind_and_name(entry) for state in pipe.states for entry in state.tensors]
    assert {name for _, name in entries} == changed
    assert {name for kind, name in entries if kind.startswith("optimizer")} == parameters
    if pattern != "all":
        assert not any(torch.equal(pipe.weights[n], dict(model_of(pattern).named_parameters())[n]) for n in parameters)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_gradient_flows_below_the_first_trained_parameter(pattern: str) -> None:
    program = program_of(pattern)
    costs, stages = measure_costs(program, batch=8), split(program, cuts_of(program))
    for i, stage in enumerate(stages):
        is_trained_before = any(s.trainable for earlier in stages[:i] for s in earlier.state)
        assert any(value.grad for value in stage.inputs) == is_trained_before
    first = next(i for i, op in enumerate(program.ops) if costs.ops[i].backward_flops)
    assert all(not op.backward_flops for op in costs.ops[:first])
    trainable = {s.name for s in program.state if s.trainable}
    reads = [i for i, op in enumerate(program.ops) if any(f"%{name}" in map(str, op.args) for name in trainable)]
    assert first == reads[0]


def test_a_stage_below_it_neither_repeats_its_forward_nor_saves_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of("last block")
    stage = split(program, cuts_of(program))[1]
    calls = []
    run = Interpreter.__call__

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return run(*args, **kwargs)

    monkeypatch.setattr(Interpreter, "__call__", counted)
    inputs = fake_inputs(stage.inputs, 8)
    for recompute in (False, True):
        tape = Tape(Interpreter(stage), stage_weights(program, stage), inputs, recompute=recompute)
        assert not any(output.requires_grad for output in tape.outputs)
        assert tape.backward([None] * len(stage.outputs)) == [None] * len(stage.inputs)
    assert len(calls) == 2


def test_frozen_tied_parameters_are_part_of_every_stage_that_reads_them() -> None:
    for pattern, is_frozen in (("last block", True), ("all", False)):
        stages = split(program_of(pattern), cuts_of(program_of(pattern)))
        assert [s.target for stage in stages for s in stage.borrowed] == ([] if is_frozen else ["embed.weight"])
        assert [bool(role.lends) for role in roles(stages, [0] * 4)] == [not is_frozen, False, False, False]


def test_the_plan_counts_frozen_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "time_ops", lambda program, costs: [OpSeconds(1e-6, 1e-6)] * len(program.ops))
    program = program_of("last block")
    chain = chain_of(program, measure_costs(program, 8))
    trainable = sum(s.num_bytes for s in program.state if s.trainable)
    assert sum(storage.num_bytes for storage in chain.weights) == trainable
    fixed = sum(s.num_bytes for s in program.state if not s.trainable)
    assert sum(storage.num_bytes for storage in chain.fixed) == fixed
    assert trainable == 4 * (WIDTH * WIDTH + 3 * WIDTH)


@pytest.mark.parametrize("pattern", ["last block", "head's bias"])
def test_a_fleet_may_cut_between_frozen_parameters(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "time_ops", lambda program, costs: [OpSeconds(1e-6, 1e-6)] * len(program.ops))
    program = program_of(pattern)
    chain = chain_of(program, measure_costs(program, 8)).sharing_weights()
    assert set(cuts_of(program)[:2]) <= set(chain.cuts)
    for cut in chain.cuts:
        assert all(any(s.kind == "parameter" for s in stage.state) for stage in split(program, [cut]))


class TwoClusters(ClusterBuilder):
    """Two clusters of two given machines each."""

    def cluster(self, name: str, members: tuple[str, str], cut: int) -> ClusterSpec:
        self._machines |= {member: Machine(name=member, speed=1.0, memory_bytes=10**9) for member in members}
        return ClusterSpec(
            id=name, generation=1, members=members, cuts=(cut,), accumulate=1, depths=(1, 1), samples_per_s=1.0,
            reason="a test",
        )  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rings_average_trained_tensors_only(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "time_ops", lambda program, costs: [OpSeconds(1e-6, 1e-6)] * len(program.ops))
    program = program_of(pattern)
    chain, start = chain_of(program, measure_costs(program, 8)), StartWeights(program, 0)
    builder = TwoClusters(program, chain, CONFIG, tmp_path, start, accumulate=1, microbatch=8)
    cuts = cuts_of(program)
    rings = builder.rings([builder.cluster("c1a", ("a", "b"), cuts[0]), builder.cluster("c1b", ("c", "d"), cuts[1])])
    averaged = [target for ring in rings for target in ring.targets]
    assert sorted(averaged) == sorted(s.target for s in program.state if s.trainable or s.mutated)


def test_bytes_of_states_and_uploads(tmp_path: Path) -> None:
    """Checkpoints, replicas and the final upload of a stage have trained tensors only; a node's own replica has all."""
    program = program_of("biases")
    for stage in split(program, cuts_of(program)):
        trainer = Trainer(stage, stage_weights(program, stage), CONFIG, delay=1)
        changed = {f"weights/{name}" for name in trained(stage)}
        for whole in (False, True):
            write_state(trainer.state(whole=whole), tmp_path / "state")
            with open_weights(tmp_path / "state") as file:
                weights = {name for name in file.names if name.startswith("weights/")}
                names = {kind_and_name(name)[1] for name in file.names}
            assert weights == changed
            assert names == {name.removeprefix("weights/") for name in changed}
        assert trainer.weights(frozen=False).keys() == trained(stage).keys()
        own = trainer.state(whole=False, frozen=True).weights
        assert own.keys() == {s.target for s in stage.state if s.owner == stage.index}


def test_the_model_is_assembled_from_uploads_and_start_weights(tmp_path: Path) -> None:
    program = program_of("biases")
    stages = split(program, cuts_of(program))
    start = StartWeights(program, 0)
    parts = []
    for stage in stages:
        tensors = {name: tensor + 1 for name, tensor in stage_weights(program, stage).items() if name in trained(stage)}
        parts.append(tmp_path / f"part-{stage.index}")
        with ravnest.graph.write_weights(parts[-1], trained(stage).values()) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
    gather(program, stages, parts, tmp_path / "model.safetensors", start, step=3)
    changed = {s.target for s in program.state if not s.is_frozen}
    with open_weights(tmp_path / "model.safetensors") as file:
        assert file.names == {s.target for s in program.state if s.persistent}
        for name in file.names:
            assert torch.equal(file.read(name), program.tensors[name] + (name in changed)), name
    for stage in stages:
        frozen = {s.target for s in stage.state if s.is_frozen}
        assert start.write_stage(stage, tmp_path / "frozen", frozen_only=True) == bool(frozen)
        if frozen:
            assert read_weights(stage, tmp_path / "frozen", frozen).keys() == frozen
    assert {s.target for s in frozen_state(program)} == {s.target for s in program.state} - changed


def test_a_resumed_run_has_the_frozen_weights_of_its_checkpoint(tmp_path: Path) -> None:
    program = program_of("biases")
    frozen = StartWeights(program, 0).write_frozen(tmp_path / "run")
    assert frozen is not None
    places = dict.fromkeys(frozen.tensors, tmp_path / "run" / "checkpoints" / frozen.name)
    checkpoint = SimpleNamespace(
        places=places, folder=tmp_path / "run" / "checkpoints" / "step-000001", manifest=SimpleNamespace(frozen=frozen)
    )
    other = model_of("biases")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    changed = trace(other, nn.functional.cross_entropy, batch(0))
    resumed = StartWeights(changed, 0, checkpoint)  # type: ignore[arg-type]
    tensors = dict(resumed.read(frozen_state(changed)))
    assert all(torch.equal(tensor, program.tensors[name]) for name, tensor in tensors.items())
    assert resumed.write_frozen(tmp_path / "other") == frozen
    assert (tmp_path / "other" / "checkpoints" / frozen.name).stat().st_size == frozen.num_bytes
