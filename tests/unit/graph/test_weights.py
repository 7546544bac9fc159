"""Initial weights bit-equal to the model's; files read and written one tensor at a time."""

from __future__ import annotations

import json
import pickle
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks import zoo
from benchmarks.zoo import Case
from ravnest.errors import TraceError, WeightsError
from ravnest.graph import (
    Stage,
    dump,
    initialise,
    legal_cuts,
    load,
    read_weights,
    split,
    stage_weights,
    trace,
    write_weights,
)
from tests.sampling import only
from tests.unit.graph.pipeline import thirds
from tests.unit.graph.test_equal import CASES


@cache
def stages(name: str) -> list[Stage]:
    return stages_of(CASES[name]())


def stages_of(case: Case) -> list[Stage]:
    program = trace(case.build, case.loss, case.batch(2))
    return [load(dump(stage)) for stage in split(program, thirds(legal_cuts(program)))]


def whole(case: Case, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model = case.build()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", only(["gpt", "gpt_tied", "llama", "resnet50"], CASES))
def test_stages_initialise_themselves_as_the_whole_model(name: str) -> None:
    case: Case = CASES[name]()
    reference = whole(case, seed=11)
    made: dict[str, Tensor] = {}
    for stage in stages(name):
        own = initialise(stage, seed=11)
        assert own.keys() == {s.target for s in stage.state if s.owner == stage.index}
        made.update(own)
    assert [n for n, t in made.items() if not torch.equal(t, reference[n])] == []
    assert made.keys() >= {n for n, t in reference.items() if t.requires_grad}


def test_draws_in_chunks_keep_the_generator_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.graph.weights._CHUNK", 64)
    case = zoo.gpt2()
    reference = whole(case, seed=2)
    for stage in stages_of(case):
        assert all(torch.equal(t, reference[n]) for n, t in initialise(stage, seed=2).items())


def test_initialising_leaves_the_global_random_state_unchanged() -> None:
    stage = stages("gpt")[0]
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    initialise(stage, seed=9)
    assert torch.equal(torch.rand(3), expected)


class Unusual(nn.Module):
    """Orthogonal weights, a buffer computed from others, a constant, a tensor written out, a parameter half of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 6)))
        self.mixed = nn.Parameter(torch.randn(4, 6))
        with torch.no_grad():
            self.mixed[:2].fill_(1.0)
            self.mixed.mul_(0.5)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(6), std=0.02))
        self.register_buffer("angles", 1.0 / (10.0 ** (torch.arange(0, 6).float() / 6)), persistent=False)
        self.register_buffer("table", torch.tensor([[1.0, float("-inf")], [2.0, 3.0]]))
        self.plain = torch.linspace(0, 1, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight * self.angles + self.mixed.sum(0) * self.truncated + self.plain  # type: ignore[operator]
        return (y + self.table[1, 0]).sum(1)  # type: ignore[index]


def test_unusual_ways_to_initialise() -> None:
    case = Case("unusual", Unusual, nn.functional.mse_loss, lambda n: (torch.ones(n, 6), torch.ones(n)))
    reference = whole(case, seed=5)
    program = trace(Unusual, case.loss, case.batch(3))
    made: dict[str, Tensor] = {}
    for stage in split(program, legal_cuts(program)):
        made.update(initialise(load(dump(stage)), seed=5))
    plain = next(n for n in made if n.startswith("constant."))
    assert torch.equal(made.pop(plain), torch.linspace(0, 1, 6))
    assert made.keys() == reference.keys()
    assert [n for n, t in made.items() if not torch.equal(t, reference[n])] == []


def test_a_builder_that_uses_existing_tensors_is_rejected() -> None:
    ready = torch.ones(100_000)

    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_buffer("ready", ready + 1)
        return model

    with pytest.raises(TraceError, match="pass the model itself"):
        trace(build, lambda y, t: y.sum(), (torch.ones(2, 4), torch.ones(2)))


def test_a_file_is_written_and_read_by_stages(tmp_path: Path) -> None:
    case = zoo.digits()
    torch.manual_seed(0)
    model = case.build()
    program = trace(model, case.loss, case.batch(2))
    stages = split(program, [6, 12])
    path = tmp_path / "model.safetensors"
    contents = [s for s in program.state if s.persistent]
    with write_weights(path, contents, {"ties": json.dumps(dict(program.ties))}) as writer:
        for stage in reversed(stages):
            for name, tensor in stage_weights(program, stage).items():
                writer.write(name, tensor)
    assert not list(tmp_path.glob(".*"))
    loaded = load_file(path)
    fresh = case.build()
    fresh.load_state_dict(loaded)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in fresh.state_dict().items())
    for stage in stages:
        own = read_weights(stage, path)
        assert own.keys() == {s.target for s in stage.state}
        assert all(torch.equal(t, model.state_dict()[n]) for n, t in own.items())


def test_an_unfinished_file_never_appears(tmp_path: Path) -> None:
    stage = stages("gpt")[0]
    path = tmp_path / "w.safetensors"
    with pytest.raises(WeightsError, match="were not written"), write_weights(path, stage.state):
        pass
    with pytest.raises(KeyboardInterrupt), write_weights(path, stage.state):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with write_weights(tmp_path / "v", stage.state[:1]) as writer:
        with pytest.raises(WeightsError, match="declared"):
            writer.write(stage.state[0].target, torch.zeros(3))
        with pytest.raises(ValueError, match="not declared"):
            writer.write("other", torch.zeros(3))
        writer.write(stage.state[0].target, torch.zeros(stage.state[0].shape))


@pytest.mark.parametrize(
    "kind", ["pickle", "zip", "text", "missing", "empty", "cut", "header", "shape", "dtype", "name"]
)
def test_invalid_files_are_rejected(kind: str, tmp_path: Path) -> None:
    stage = stages("gpt")[0]
    path = tmp_path / "w.safetensors"
    good = initialise(stage, 0)
    save_file(good, path)
    first = next(iter(good))
    match kind:
        case "pickle":
            path.write_bytes(pickle.dumps(good))
        case "zip":
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("data.pkl", pickle.dumps(1))
        case "text":
            path.write_text("not weights")
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(path.read_bytes()[:-100])
        case "header":
            path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
        case "shape":
            save_file({**good, first: torch.zeros(3)}, path)
        case "dtype":
            save_file({**good, first: good[first].double()}, path)
        case "name":
            save_file({n: t for n, t in good.items() if n != first}, path)
    with pytest.raises(WeightsError, match=r"w\.safetensors"):
        read_weights(stage, path)
