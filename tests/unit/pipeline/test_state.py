"""Saved states of stages: training resumes from them bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ravnest.core.schedule import StageSchedule, stage_schedules
from ravnest.errors import WeightsError
from ravnest.graph import Program, initialise, legal_cuts, split, trace, write_weights
from ravnest.graph.program import StateSpec
from ravnest.graph.weights import open_weights
from ravnest.pipeline import staleness as corrections
from ravnest.pipeline.config import MEMORY_MODES, TrainerConfig
from ravnest.pipeline.optimizers import LAMB, SGD, SOAP, Adam, AdamW, Muon, NAdam, Optimizer, cosine
from ravnest.pipeline.staleness import Correction
from ravnest.pipeline.state import StageState, join, kind_and_name, read_state, select, write_state
from ravnest.pipeline.trainer import Trainer
from tests.unit.pipeline.pipe import Pipe, train

WORDS = 12


class Tied(nn.Module):
    """An embedding that is tied to the output layer, with dropout between."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 6))
        self.head = nn.Linear(6, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids)))  # type: ignore[no-any-return]


class Normed(nn.Module):
    """Convolutions with batch norms: buffers that forward passes change."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(),
            nn.Linear(27, 5), nn.BatchNorm1d(5), nn.Linear(5, WORDS),
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(ids.float().view(-1, 1, 3, 3))  # type: ignore[no-any-return]


MODELS: dict[str, type[nn.Module]] = {"tied": Tied, "normed": Normed}
OPTIMIZERS = [
    SGD(0.1), SGD(0.1, momentum=0.9, nesterov=True), Adam(1e-2), AdamW(1e-2, schedule=cosine(20, warmup_steps=3)),
    NAdam(1e-2), Muon(1e-2), AdamW(1e-2, clip_norm=0.5), SOAP(1e-2, basis_every=2), LAMB(1e-2),
]  # fmt: skip
CORRECTIONS = [
    corrections.none(), corrections.DEFAULT, corrections.look_ahead(1.5),
    corrections.Correction(look_ahead=1.0, compensation=0.1, lr_discount=0.5),
]  # fmt: skip
MODES: dict[str, Callable[[int], list[StageSchedule]]] = {
    "synchronous": lambda count: stage_schedules(_depths(count), 2, synchronous=True),
    "double-buffered": lambda count: stage_schedules(_depths(count), 4),
    "paper": lambda count: stage_schedules([2 * d - 1 for d in _depths(count)], 1),
}


def _depths(count: int) -> list[int]:
    return [count - i for i in range(count)]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten()[: outputs.flatten(0, -2).shape[0]])


@cache
def program_of(name: str, dropout: float) -> Program:
    torch.manual_seed(3)
    return trace(MODELS[name](dropout), loss, batch_of(name, 0))


def batch_of(name: str, number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(number)
    ids = torch.randint(0, WORDS, (8, 9), generator=drawn)
    return ids, torch.randint(0, WORDS, (8, 9) if name == "tied" else (8,), generator=drawn)


def cuts_of(program: Program, places: Sequence[float]) -> list[int]:
    legal = legal_cuts(program)
    return sorted({legal[int(place * len(legal))] for place in places})


places = st.lists(st.floats(0, 0.999), min_size=0, max_size=3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(MODELS)),
    dropout=st.sampled_from([0.0, 0.3]),
    at=places,
    mode=st.sampled_from(sorted(MODES)),
    optimizer=st.sampled_from(OPTIMIZERS),
    correction=st.sampled_from(CORRECTIONS),
    memory=st.sampled_from(MEMORY_MODES),
    before=st.integers(0, 5),
    after=st.integers(1, 4),
)
def test_training_resumes_bit_for_bit(
    name: str,
    dropout: float,
    at: list[float],
    mode: str,
    optimizer: Optimizer,
    correction: Correction,
    memory: str,
    before: int,
    after: int,
) -> None:
    program = program_of(name, dropout)
    cuts = cuts_of(program, at)
    config = TrainerConfig(optimizer=optimizer, correction=correction, seed=5, memory=memory)
    rule = MODES[mode](len(cuts) + 1)
    data = [batch_of(name, i) for i in range(before + after)]
    through = train(program, cuts, data, config, rule, save_at=before)
    resumed = train(program, cuts, data[before:], config, rule, start=join(through.states))
    assert {state.updates for state in through.states} == {before}
    assert_same(resumed, through, before * rule[0].accumulate)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(MODELS)),
    at=places,
    other=places,
    optimizer=st.sampled_from([o for o in OPTIMIZERS if o.clip_norm is None]),
    memory=st.sampled_from(["compact", "small"]),
    whole=st.booleans(),
)
def test_training_resumes_with_other_cuts(
    name: str, at: list[float], other: list[float], optimizer: Optimizer, memory: str, whole: bool,
    tmp_path_factory: Tmp,
) -> None:  # fmt: skip
    """Through files: three steps with some cuts, the rest with others. (A clipped norm is summed stage by stage.)"""
    program, folder = program_of(name, 0.0), tmp_path_factory.mktemp("states")
    config = TrainerConfig(optimizer=optimizer, correction=corrections.DEFAULT, memory=memory)
    data = [batch_of(name, i) for i in range(6)]
    cuts, others = cuts_of(program, at), cuts_of(program, other)
    # with several microbatches per step the shares of a tied gradient would be added in another order
    through = train(program, cuts, data, config, _one_by_one(len(cuts) + 1), save_at=3, whole=whole)
    paths = [folder / f"{i}" for i in range(len(through.states))]
    for state, path in zip(through.states, paths, strict=True):
        write_state(state, path)
    start = join([read_state(stage, paths) for stage in split(program, others)])
    resumed = train(program, others, data[3:], config, _one_by_one(len(others) + 1), start=start)
    if (name, memory) == ("tied", "small"):  # the shares of a tied gradient are rounded to bfloat16 one by one
        assert all((t - through.weights[n]).abs().max() < 0.02 for n, t in resumed.weights.items())
    else:
        assert_same(resumed, through, 3)


@pytest.mark.parametrize("before", MEMORY_MODES)
@pytest.mark.parametrize("after", MEMORY_MODES)
def test_a_state_resumes_in_another_memory_mode(before: str, after: str, tmp_path: Path) -> None:
    """Within the rounding of packed tensors, and exactly in the same mode."""
    work = trainer(memory=before)
    for step in range(3):
        train_step(work, step)
    write_state(work.state(whole=True, copies=False), tmp_path / "state")
    other = trainer(read_state(work.stage, [tmp_path / "state"]), memory=after)
    for name, tensor in work.weights().items():
        assert torch.allclose(other.weights()[name], tensor, rtol=0, atol=1e-7), name
    for step in range(3, 5):
        train_step(work, step)
        train_step(other, step)
    for name, tensor in work.weights().items():
        if before == after:
            assert torch.equal(other.weights()[name], tensor), name
        assert torch.allclose(other.weights()[name].float(), tensor.float(), rtol=0, atol=0.02), name


def test_an_update_waits_until_the_state_has_been_read() -> None:
    work = trainer()
    for step in range(2):
        train_step(work, step)
    state, is_read = work.state(whole=True, copies=False), threading.Event()
    expected = {entry: tensor.clone() for entry, tensor in state.tensors.items()}
    work.read_until(is_read)
    updating = threading.Thread(target=train_step, args=(work, 2), daemon=True)
    updating.start()
    read = {entry: tensor.clone() for entry, tensor in state.tensors.items()}  # forwards change the buffers meanwhile
    assert work.versions.newest == 2
    is_read.set()
    updating.join(60)
    assert work.versions.newest == 3
    assert [entry for entry, tensor in expected.items() if not torch.equal(tensor, read[entry])] == []


Tmp = pytest.TempPathFactory


def _one_by_one(count: int) -> list[StageSchedule]:
    return stage_schedules(_depths(count), 1, synchronous=True)


def assert_same(resumed: Pipe, through: Pipe, first: int) -> None:
    assert resumed.losses == {number: values for number, values in through.losses.items() if number >= first}
    assert resumed.weights.keys() == through.weights.keys()
    assert [n for n, t in resumed.weights.items() if not torch.equal(t, through.weights[n])] == []


@pytest.mark.parametrize("mode", MODES)
def test_a_light_state_resumes_from_the_master_weights(mode: str) -> None:
    """With a delay its first steps run on newer weights than in the saved run; the difference stays small."""
    program = program_of("tied", 0.0)
    cuts = cuts_of(program, (0.3, 0.6))
    config, rule = TrainerConfig(optimizer=AdamW(1e-2), correction=corrections.DEFAULT), MODES[mode](len(cuts) + 1)
    data = [batch_of("tied", i) for i in range(8)]
    through = train(program, cuts, data, config, rule, save_at=4, whole=False)
    assert {kind_and_name(e)[0].split("/")[0] for s in through.states for e in s.tensors} == {"weights", "optimizer"}
    resumed = train(program, cuts, data[4:], config, rule, start=join(through.states))
    late = any(r.delay for r in rule)
    for name, tensor in resumed.weights.items():
        assert torch.equal(tensor, through.weights[name]) or late
        assert (tensor - through.weights[name]).abs().max() < 0.05


def trainer(
    start: StageState | None = None, optimizer: Optimizer | None = None, delay: int = 1, memory: str = "compact"
) -> Trainer:
    (stage,) = split(program_of("normed", 0.0), ())
    config = TrainerConfig(optimizer=optimizer or AdamW(1e-2), correction=corrections.DEFAULT, memory=memory)
    first = {n: t.detach().clone() for n, t in program_of("normed", 0.0).tensors.items()}
    return Trainer(stage, first, config, delay=delay, start=start)


def train_step(work: Trainer, step: int) -> None:
    version = max(0, step - work.versions.delay)
    work.forward(step, step, version, list(batch_of("normed", step)), 1.0)
    work.backward(step, None)
    work.update(step, version, work.take_gradients(step, version)[0], None)


def test_a_state_is_a_copy() -> None:
    work = trainer()
    for step in range(3):
        train_step(work, step)
    state = work.state(whole=True)
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    for step in range(3, 6):
        train_step(work, step)
    assert {kind_and_name(entry)[0] for entry in before} == {
        "weights", "optimizer/step", "optimizer/exp_avg", "optimizer/exp_avg_scale", "optimizer/exp_avg_sq",
        "optimizer/exp_avg_sq_scale", "version-0", "version-1", "last-step", "last-step-scale", "offset",
        "offset-scale",
    }  # fmt: skip
    assert all(torch.equal(tensor, state.tensors[name]) for name, tensor in before.items())


@pytest.mark.parametrize("whole", [True, False])
def test_a_pending_shift_is_saved(whole: bool) -> None:
    work = trainer()
    train_step(work, 0)
    work.shift({"body.5.bias": torch.full((5,), 2.0)})
    left = {name: tensor.clone() for name, tensor in work.weights().items()}
    other = trainer(work.state(whole=whole))
    moved = other.weights()["body.5.bias"] - left["body.5.bias"]
    assert torch.allclose(moved, torch.full((5,), 0.0 if whole else 2.0))
    if whole:
        train_step(work, 1)
        train_step(other, 1)
        assert all(torch.equal(tensor, other.weights()[name]) for name, tensor in work.weights().items())


def test_a_missing_version_is_replaced_by_the_next_newer_one() -> None:
    """The state of a stage without delay starts one with a delay of three."""
    work = trainer(delay=0)
    for step in range(5):
        train_step(work, step)
    other = trainer(work.state(whole=True), delay=3)
    assert other.versions.live == [2, 3, 4, 5]
    for version in other.versions.live:
        assert torch.equal(other.versions[version]["body.5.bias"], work.versions.master["body.5.bias"])
    train_step(other, 5)
    assert other.versions.live == [3, 4, 5, 6], "each has its own memory"
    assert torch.equal(other.versions[3]["body.5.bias"], work.versions.master["body.5.bias"])


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9), NAdam(), Muon(), SOAP()], ids=lambda o: o.name)
def test_state_of_another_optimizer_is_rejected(optimizer: Optimizer) -> None:
    work = trainer()
    train_step(work, 0)
    with pytest.raises(WeightsError, match="must have"):
        trainer(work.state(whole=False), optimizer)


@pytest.mark.parametrize(
    ("entry", "tensor", "message"),
    [
        ("weights/body.5.bias", torch.zeros(6), r"must be float32 \[5\], got float32 \[6\]"),
        ("weights/body.5.bias", torch.zeros(5).double(), r"got float64 \[5\]"),
        ("version-1/body.5.bias", torch.zeros(()), r"got float32 \[\]"),
        ("optimizer/exp_avg/body.5.bias", torch.zeros(4), r"got float32 \[4\]"),
        ("optimizer/exp_avg/body.5.bias", torch.zeros(5), "must have step"),
        ("optimizer/left/body.5.weight", torch.zeros(4, 4), r"must be float32 \[5, 27\], got float32 \[4, 4\]"),
        ("secret/body.5.bias", torch.zeros(5), "not an entry of a stage state"),
        ("version-x/body.5.bias", torch.zeros(5), "not an entry of a stage state"),
    ],
)
def test_an_entry_that_does_not_fit_is_rejected(entry: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    state = StageState(1, {entry: tensor})
    with pytest.raises(WeightsError, match=message):
        trainer(state)
    if "must have" not in message:  # checked by Stepper only
        write_state(state, tmp_path / "state")
        with pytest.raises(WeightsError, match=message):
            read_state(split(program_of("normed", 0.0), ())[0], [tmp_path / "state"])


def test_only_entries_of_the_stage_are_read(tmp_path: Path) -> None:
    program = program_of("normed", 0.0)
    work = trainer()
    train_step(work, 0)
    write_state(work.state(whole=True), tmp_path / "all")
    first, last = split(program, cuts_of(program, (0.5,)))
    states = [read_state(stage, [tmp_path / "all"]) for stage in (first, last)]
    assert states[0].weights.keys() == {s.target for s in first.state if s.owner == 0}
    assert not states[0].tensors.keys() & states[1].tensors.keys()
    assert join(states).tensors.keys() == work.state(whole=True).tensors.keys()
    select(tmp_path / "all", tmp_path / "all", [s.target for s in first.state])
    assert read_state(first, [tmp_path / "all"]).tensors.keys() == states[0].tensors.keys()
    with open_weights(tmp_path / "all") as file:
        assert file.names == states[0].tensors.keys()
    assert read_state(last, [tmp_path / "all"]) == StageState(1)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    (stage,) = split(program_of("normed", 0.0), ())
    with pytest.raises(WeightsError, match="is not a safetensors file"):
        read_state(stage, [tmp_path / "missing"])
    with write_weights(tmp_path / "weights", [StateSpec("w", "w", "float32", (2,))]) as writer:
        writer.write("w", torch.zeros(2))
    with pytest.raises(WeightsError, match="is not a state of format"):
        read_state(stage, [tmp_path / "weights"])


def test_kind_and_name() -> None:
    assert kind_and_name("weights/a.b") == ("weights", "a.b")
    assert kind_and_name("optimizer/exp_avg/a/b.c") == ("optimizer/exp_avg", "a/b.c")
    assert kind_and_name("version-2/a") == ("version-2", "a")


def test_a_state_without_weights_starts_from_the_seed() -> None:
    model = lambda: Normed(0.0)  # noqa: E731
    (stage,) = split(trace(model, loss, batch_of("normed", 0)), ())
    config = TrainerConfig(optimizer=AdamW(), correction=corrections.none())
    work = Trainer(stage, initialise(stage, 4), config, delay=2, start=StageState(7))
    assert work.versions.live == [5, 6, 7]
    assert work.state(whole=False).updates == 7
