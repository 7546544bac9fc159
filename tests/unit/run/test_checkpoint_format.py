"""Checkpoints: complete or not there, checked before they are used, and never a reason to stop training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import ravnest
from ravnest.errors import WeightsError
from ravnest.graph import Program, trace
from ravnest.pipeline.state import StageState, write_state
from ravnest.run.checkpoint.format import (
    Checkpoint,
    Draft,
    Manifest,
    checkpoints_in,
    choose,
    clear_drafts,
    fingerprint,
    prune,
)
from ravnest.run.checkpoint.resume import check_same
from ravnest.run.checkpoint.start import StartWeights
from ravnest.run.checkpoint.writer import CheckpointConfig, RunCheckpoints
from ravnest.run.data import Batches
from ravnest.run.metrics import MetricsFile
from ravnest.run.plan import PipelinePlan
from tests.unit.coordinator.conftest import small_disk

__all__ = ["small_disk"]

DISK_SIZE = "64k"


def program(width: int = 3, dropout: float = 0.1) -> Program:
    model = nn.Sequential(nn.Linear(2, width), nn.Dropout(dropout), nn.Linear(width, 1))
    return trace(model, nn.functional.mse_loss, (torch.zeros(4, 2), torch.zeros(4, 1)))


def about(traced: Program | None = None) -> Manifest:
    return Manifest(
        step=0, batches=0, seed=7, program="" if traced is None else fingerprint(traced), optimizer=ravnest.AdamW(),
        names=("a",), ties={}, cuts=(), accumulate=1, depths=(1,), delays=(0,),
    )  # fmt: skip


def state(step: int, size: int = 4) -> StageState:
    return StageState(step, {"weights/a": torch.full((size,), float(step)), "optimizer/exp_avg/a": torch.zeros(size)})


def make(run: Path, step: int) -> Checkpoint:
    draft = Draft(run, step, step)
    for index in range(2):
        write_state(state(step), draft.stage(index))
    return draft.complete(msgspec.structs.replace(about(), batches=step))


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints_in(run)]


def test_it_is_there_when_it_is_complete(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 100, 100)
    write_state(state(100), draft.stage(0))
    assert steps(tmp_path) == []
    made = draft.complete(about())
    assert made.folder == tmp_path / "checkpoints" / "step-000100"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000100"]
    chosen = choose(tmp_path)
    assert (chosen.checkpoint, chosen.skipped) == (made, ())
    assert choose(made.folder).checkpoint == made
    (file,) = made.manifest.files
    assert (file.name, file.tensors) == ("stage-0.safetensors", ("optimizer/exp_avg/a", "weights/a"))
    assert made.run == tmp_path


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 1_000_000, 20, 10):
        make(tmp_path, step)
    prune(tmp_path, 3)
    assert steps(tmp_path) == [10, 20, 1_000_000]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")] == []


def test_one_takes_the_place_of_another_of_the_same_step(tmp_path: Path) -> None:
    first = make(tmp_path, 5)
    assert make(tmp_path, 5).folder == first.folder
    assert steps(tmp_path) == [5]


def _cut_short(folder: Path) -> None:
    path = folder / "stage-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _turn_a_bit(folder: Path) -> None:
    path = folder / "stage-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _rewrite(change: dict[str, Any]) -> Any:
    def rewrite(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(content | change))

    return rewrite


DAMAGE = {
    "short": (_cut_short, "bytes, expected"),
    "a bit": (_turn_a_bit, "its digest differs"),
    "a file is gone": (lambda folder: (folder / "stage-0.safetensors").unlink(), "cannot be read"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    "half a manifest": (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    "an older format": (_rewrite({"format": "ravnest-checkpoint/1"}), "this release reads"),
    "a path to elsewhere": (
        _rewrite({"files": [{"name": "../../x.safetensors", "digest": "", "num_bytes": 1, "tensors": []}]}),
        "name must be that of a state file",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_damaged_is_passed_over(name: str, tmp_path: Path) -> None:
    damage, reason = DAMAGE[name]
    good, bad = make(tmp_path, 10), make(tmp_path, 20)
    damage(bad.folder)
    chosen = choose(tmp_path)
    assert chosen.checkpoint == good
    assert len(chosen.skipped) == 1
    assert chosen.skipped[0].startswith("skipped step-000020: ")
    assert reason in chosen.skipped[0]
    with pytest.raises(WeightsError, match=reason):
        choose(bad.folder)
    damage(good.folder)
    with pytest.raises(WeightsError, match="has no usable checkpoint"):
        choose(tmp_path)


def test_nothing_to_choose_from(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="--checkpoint-every"):
        choose(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        choose(tmp_path / "elsewhere")


def test_stages_that_saved_different_updates_are_no_checkpoint(tmp_path: Path) -> None:
    draft = Draft(tmp_path, 4, 4)
    write_state(state(4), draft.stage(0))
    write_state(state(5), draft.stage(1))
    with pytest.raises(WeightsError, match="has the state after 5 updates, expected 4"):
        draft.complete(about())
    assert steps(tmp_path) == []


def test_what_a_killed_run_has_left_goes(tmp_path: Path) -> None:
    make(tmp_path, 1)
    write_state(state(2), Draft(tmp_path, 2, 2).stage(0))
    clear_drafts(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


PLAN = PipelinePlan((), (), (), (), 1, 1, 1.0, "")


def checkpoints(run: Path, config: CheckpointConfig, traced: Program | None = None) -> RunCheckpoints:
    start = StartWeights(traced or program(), 0)
    return RunCheckpoints(run, config, lambda plan: about(), lambda: start.write_frozen(run))


def begin(kept: RunCheckpoints, updates: int, num_stages: int, step: int) -> list[Path]:
    """Begin a checkpoint of cluster c1; where its stages are to be written."""
    plan = replace(PLAN, stages=(None,) * num_stages)  # type: ignore[arg-type]
    assert kept.begin("c1", plan, updates=updates, step=step)
    assert kept.last_step == step
    paths = [kept.state_path("c1", stage, updates) for stage in range(num_stages)]
    return [path for path in paths if path is not None]


def test_a_checkpoint_waits_for_every_stage(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("idle", torch.ones(3))
    traced = trace(model, nn.functional.mse_loss, (torch.zeros(4, 2), torch.zeros(4, 1)))
    kept = checkpoints(tmp_path, CheckpointConfig(every=2, keep=2), traced)
    for step, updates in ((2, 1), (4, 2), (6, 4)):  # another cluster has trained the other batches
        paths = begin(kept, updates, 2, step=step)
        for stage in (1, 0):
            assert kept.is_waiting
            write_state(state(updates), paths[stage])
            kept.saved("c1", stage, updates, "")
        kept.join()
        assert not kept.is_waiting
        assert kept.has("c1", updates)
    assert steps(tmp_path) == [4, 6]
    assert sorted(path.name for path in tmp_path.glob("checkpoints/step-*")) == ["step-000004", "step-000006"]
    assert kept.messages() == []
    newest = choose(tmp_path).checkpoint
    assert (newest.step, newest.updates, newest.manifest.seed) == (6, 4, 7)
    assert newest.manifest.frozen is not None
    assert newest.manifest.frozen.tensors == ("weights/idle",)
    kept_once = list((tmp_path / "checkpoints").glob("frozen-*"))
    assert kept_once == [newest.frozen_path]
    kept_once[0].write_bytes(b"another file")
    with pytest.raises(WeightsError, match=r"frozen-.* has 12 bytes"):
        choose(tmp_path)


def test_a_stage_that_cannot_write_costs_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, CheckpointConfig(every=2))
    paths = begin(kept, 2, 2, step=2)
    write_state(state(2), paths[0])
    kept.saved("c1", 0, 2, "")
    kept.saved("c1", 1, 2, "No space left on device")
    kept.join()
    assert kept.messages() == ["the checkpoint of step 2 was not written, training continues: No space left on device"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_run_that_ends_drops_later_checkpoints(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, CheckpointConfig(every=2))
    begin(kept, 2, 1, step=2)
    begin(kept, 4, 1, step=4)
    kept.discard_after(2)
    assert kept.state_path("c1", 0, 2) is not None
    assert kept.state_path("c1", 0, 4) is None
    kept.close()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_lost_cluster_takes_its_checkpoints_along(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, CheckpointConfig(every=2))
    begin(kept, 2, 1, step=2)
    kept.cluster_ended("c9")
    assert kept.is_waiting
    kept.cluster_ended("c1")
    kept.saved("c1", 0, 2, "")  # too late, and of no consequence
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_full_disk_leaves_nothing_half_done(small_disk: Path) -> None:
    kept = checkpoints(small_disk, CheckpointConfig(every=1, keep=9))
    left_out = 0
    for step in range(1, 9):
        plan = replace(PLAN, stages=(None,))  # type: ignore[arg-type]
        if kept.begin("c1", plan, updates=step, step=step):
            failure, path = "", kept.state_path("c1", 0, step)
            assert path is not None
            try:
                write_state(state(step, size=2000), path)
            except OSError as error:
                failure = str(error)
            kept.saved("c1", 0, step, failure)
            kept.join()
        left_out += len(kept.messages())
    assert left_out > 0
    assert steps(small_disk) == list(range(1, 9 - left_out)), "those that had room are complete"
    assert all(checkpoint.problem() is None for checkpoint in checkpoints_in(small_disk))
    assert [p for p in (small_disk / "checkpoints").iterdir() if p.name.startswith(".")] == []


def test_metrics_go_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in range(1, 6):
            file.write({"step": step, "seconds": step / 2})
        file.write({"evaluation": 4, "seconds": 9.0})
    with path.open("a") as text:
        text.write('{"step": 6, "sec')  # killed in the middle of a line
    with MetricsFile(path, after=3) as file:
        assert file.seconds == 1.5
        file.write({"step": 4, "seconds": 2.5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    with MetricsFile(path):
        assert path.read_text() == "", "a run that begins has none"


def test_metrics_on_a_full_disk(small_disk: Path) -> None:
    path, refused = small_disk / "metrics.jsonl", 0
    with MetricsFile(path) as file:
        for step in range(1000):
            try:
                file.write({"step": step, "text": "x" * 100})
            except OSError:
                refused += 1
    lines = path.read_text().splitlines()
    assert refused == 1000 - len(lines) > 0
    assert [json.loads(line)["step"] for line in lines] == list(range(len(lines))), "whole lines only"


class Numbers:
    """Data that can be begun anywhere."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, -1

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def skip(self, number: int) -> Iterator[int]:
        self.asked = number
        return iter(range(number, self.count))


@pytest.mark.parametrize("used", [0, 1, 4, 5, 6, 13])
def test_batches_that_were_used_are_passed_over(used: int) -> None:
    plain, quick = Batches(list(range(5))), Batches(data := Numbers(5))
    for batches in (plain, quick):
        batches.skip(used)
    assert data.asked == used % 5
    following = [(used + i) % 5 for i in range(7)]
    assert [plain.next() for _ in range(7)] == following
    assert [quick.next() for _ in range(7)] == following
    assert plain.epochs == quick.epochs == (used + 6) // 5


def test_data_that_end_too_soon() -> None:
    with pytest.raises(ValueError, match="the data ended after 3 batches, but the run has already used 4"):
        Batches(iter(range(3))).skip(4)


def checkpoint_of(traced: Program, run: Path) -> Checkpoint:
    draft = Draft(run, 1, 1)
    tensors = {f"weights/{s.target}": torch.zeros(s.shape) for s in traced.state}
    write_state(StageState(1, tensors), draft.stage(0))
    return draft.complete(about(traced))


def test_the_same_model_and_optimizer_go_on(tmp_path: Path) -> None:
    made = checkpoint_of(program(), tmp_path)
    assert check_same(made, program(), ravnest.AdamW()) == []
    (told,) = check_same(made, program(), ravnest.AdamW(lr=0.5))
    assert told == "lr changes from 0.001 to 0.5"


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    made = checkpoint_of(program(), tmp_path)
    for other in (program(width=4), program(dropout=0.2)):
        with pytest.raises(ValueError, match="same names, but their shapes, the operations, the loss"):
            check_same(made, other, ravnest.AdamW())
    deeper = trace(
        nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1), nn.Linear(3, 1), nn.Linear(1, 1)),
        nn.functional.mse_loss, (torch.zeros(4, 2), torch.zeros(4, 1)),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"the checkpoint lacks 3\.bias and 1 more"):
        check_same(made, deeper, ravnest.AdamW())
    for optimizer in (ravnest.SGD(0.1), ravnest.AdamW(weight_decay=0.2), ravnest.Muon()):
        with pytest.raises(ValueError, match=r"it was AdamW\(.*, it is "):
            check_same(made, program(), optimizer)
