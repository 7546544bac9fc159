"""Trackers with their real libraries: what they log is read back, and a resumed run continues the same run."""

from __future__ import annotations

import importlib.util
import math
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ravnest
from ravnest.core.metrics import StageMetrics
from ravnest.events import (
    Callback,
    EndEvent,
    EvaluationEvent,
    NodeJoinedEvent,
    NodeLostEvent,
    PlanEvent,
    RoundEvent,
    StartEvent,
    StepEvent,
    TrainingEvent,
)
from ravnest.trackers import TRACKERS, make_trackers
from ravnest.trackers.tracker import flatten, load_identity, save_identity

# warnings of the libraries themselves
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def events(folder: Path, first: int, last: int, *, is_resumed: bool = False) -> list[TrainingEvent]:
    """A run from step `first` to step `last`; its loss is 1 / step."""
    at: dict[str, Any] = {"samples": 4 * first, "seconds": float(first)}
    begun: list[TrainingEvent] = [
        StartEvent(
            step=first, folder=folder, name="tiny", is_resumed=is_resumed,
            config={"seed": 7, "correction": {"name": "none"}, "run_dir": None, "track": ["x", "y"]},
            optimizer={"name": "AdamW", "lr": 0.1}, batch_size=4, **at,
        ),
        NodeJoinedEvent(step=first, node="ann", memory_bytes=10, is_back=False, **at),
        NodeJoinedEvent(step=first, node="bob", memory_bytes=10, is_back=False, **at),
        PlanEvent(
            step=first, cluster="c1", nodes=("ann", "bob"), samples_per_s=5.0, reason="near",
            plan={"cuts": [3], "stages": []}, **at,
        ),
    ]  # fmt: skip
    trained: list[TrainingEvent] = [
        StepEvent(
            step=step, samples=4 * step, seconds=float(step), loss=1 / step,
            metrics={"accuracy": 0.5, "top@5 (é)": 0.75}, learning_rate=0.1, samples_per_s=4.0,
            staleness=1.0, cluster="c1", stages=(StageMetrics(),),
        )
        for step in range(first + 1, last + 1)
    ]  # fmt: skip
    at = {"step": last, "samples": 4 * last, "seconds": float(last)}
    return [
        *begun, *trained,
        EvaluationEvent(
            loss=0.25, metrics={"accuracy": 0.75, "worst": math.inf, "odd": math.nan}, cluster="c1", **at,
        ),
        RoundEvent(number=1, clusters=("c1", "c2"), took_s=0.5, reason="", **at),
        RoundEvent(number=2, clusters=("c1", "c2"), took_s=0.0, reason="bob was lost", **at),
        NodeLostEvent(node="bob", reason="asleep", is_voluntary=False, is_connected=False, **at),
        EndEvent(outcome="finished", reason="", model=None, **at),
    ]  # fmt: skip


def track(make: Callable[[], Callback], folder: Path) -> None:
    """A run that is killed after step 5, and resumed from a checkpoint of step 3: steps 4 and 5 come again."""
    first = make()
    for event in events(folder, 0, 5)[:-1]:
        first.on_event(event)
    end = EndEvent(step=5, samples=20, seconds=5.0, outcome="failed", reason="killed", model=None)
    first.on_event(end)
    resumed = make()
    for event in events(folder, 3, 8, is_resumed=True):
        resumed.on_event(event)


def missing(module: str) -> bool:
    return importlib.util.find_spec(module) is None


@pytest.mark.skipif(missing("tensorboard"), reason="needs the extra tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(lambda: make_trackers(["tensorboard"])[0], tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = read.Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 9)), "steps after the checkpoint count once"
    assert all(math.isclose(event.value, 1 / event.step, rel_tol=1e-6) for event in losses)
    assert [(e.step, e.value) for e in read.Scalars("validation/accuracy")] == [(8, 0.75)]
    assert [(e.step, e.value) for e in read.Scalars("round/seconds")] == [(8, 0.5)]
    assert read.Scalars("nodes")[-1].value == 1.0
    assert {"accuracy", "learning_rate", "samples_per_s", "staleness", "samples"} <= set(read.Tags()["scalars"])
    texts = {
        name.partition("/text_summary")[0]: [value.tensor_proto.string_val[0].decode() for value in read.Tensors(name)]
        for name in read.Tags()["tensors"]
    }
    assert "| seed | 7 |" in texts["parameters"][-1]
    assert "| optimizer/lr | 0.1 |" in texts["parameters"][-1]
    assert "ann" in texts["plan/c1"][-1]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: a log of LevelDB after a header of seven bytes."""
    position, block, parts = 7, 1 << 15, b""
    while position + 7 <= len(data):
        if block - position % block < 7:  # no header fits into the rest of a block
            position += block - position % block
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.skipif(missing("wandb"), reason="needs the extra wandb")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    track(lambda: make_trackers(["wandb"])[0], tmp_path)
    wandb.teardown()  # as at the end of a process: it writes what is left
    number = load_identity(tmp_path, "wandb")["id"]
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in runs] == [number] * len(runs)
    steps: list[list[int]] = []
    config: dict[str, str] = {}
    for path in sorted((tmp_path / "wandb").rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        steps.append([])
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            config |= {item.key: item.value_json for item in record.run.config.update}
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "loss" in items:
                steps[-1].append(int(float(items["step"])))
    assert steps == [[1, 2, 3, 4, 5], [4, 5, 6, 7, 8]]
    assert config["seed"] == "7"


@pytest.mark.skipif(missing("wandb"), reason="needs the extra wandb")
def test_wandb_without_a_key_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for an answer at the terminal."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="run `wandb login`, or set WANDB_MODE=offline"):
        make_trackers(["wandb"])


@pytest.mark.skipif(missing("mlflow") or missing("sqlalchemy"), reason="needs the extra mlflow")
def test_mlflow_in_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track(lambda: make_trackers(["mlflow"])[0], tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("ravnest")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["seed"] == "7"
    assert found.data.params["optimizer/lr"] == "0.1"
    assert "ann" in found.data.tags["plan/c1"]
    losses = client.get_metric_history(found.info.run_id, "loss")
    assert sorted(metric.step for metric in losses) == [1, 2, 3, 4, 4, 5, 5, 6, 7, 8]
    assert all(math.isclose(metric.value, 1 / metric.step) for metric in losses)
    assert client.get_metric_history(found.info.run_id, "validation/loss")[-1].value == 0.25
    assert client.get_metric_history(found.info.run_id, "top_5 _é_")[-1].value == 0.75, "a name that MLflow allows"


@pytest.mark.skipif(missing("trackio"), reason="needs the extra trackio")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    track(lambda: make_trackers(["trackio"])[0], tmp_path)
    (found,) = trackio.Api().runs("ravnest")
    assert found.name == tmp_path.name
    rows = [row for row in SQLiteStorage.get_logs("ravnest", found.name) if "loss" in row]
    assert sorted(row["step"] for row in rows) == [1, 2, 3, 4, 4, 5, 5, 6, 7, 8]
    assert all(math.isclose(row["loss"], 1 / row["step"]) for row in rows)
    assert found.config["seed"] == 7


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_library_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # `import` raises then
    job = ravnest.Job(lambda: 1 / 0, None, [])  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=rf"tracking with {name} needs its library .* pip install -e '.\[{name}\]'"):
        job.train(track=name)


def test_unknown_trackers_are_refused() -> None:
    with pytest.raises(ValueError, match="track must be one of tensorboard, wandb, mlflow, trackio, got 'tensorbord'"):
        ravnest.TrainingConfig(track=["wandb", "tensorbord"])
    assert ravnest.TrainingConfig(track="wandb").track == ("wandb",)
    assert ravnest.TrainingConfig(track=["wandb", "mlflow", "wandb"]).track == ("wandb", "mlflow")


def test_parameters_are_flat() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": [1, 2], "e": None}) == {"a/b/c": 1, "d": "[1, 2]", "e": None}


def test_identities_of_several_trackers_are_kept(tmp_path: Path) -> None:
    assert load_identity(tmp_path, "wandb") == {}
    save_identity(tmp_path, "wandb", {"id": "1"})
    save_identity(tmp_path, "mlflow", {"run_id": "2"})
    save_identity(tmp_path, "wandb", {"id": "3"})
    assert load_identity(tmp_path, "wandb") == {"id": "3"}
    assert load_identity(tmp_path, "mlflow") == {"run_id": "2"}
    (tmp_path / "trackers.json").write_text("[]")
    assert load_identity(tmp_path, "wandb") == {}
