"""Exports the weights of a run: one file with the model's own names, or a directory for `from_pretrained`.

The weights are those of the final model or of the newest checkpoint, whichever has more steps. A file has every name of
the model's state dict, including tied ones. A directory also has the model's configuration; the job file is run for it,
on this machine, as for training.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ravnest.errors import WeightsError
from ravnest.graph import StateSpec, write_weights
from ravnest.graph.weights import WeightsFile, open_weights
from ravnest.run.checkpoint.format import Checkpoint, choose
from ravnest.run.job_file import load_job

__all__ = ["export", "job_file", "newest_weights"]

_MODEL = "model.safetensors"


@dataclass(frozen=True)
class WeightsSource:
    """The place of each tensor: name in the model -> (file, name in the file)."""

    description: str
    step: int
    places: Mapping[str, tuple[Path, str]]


def export(run: Path | str, to: str, job: Path | None = None) -> str:
    """Write the weights of a run; return a message that describes the result."""
    source, target = newest_weights(Path(run)), Path(to)
    if target.suffix == ".safetensors":
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(source, target)
    else:
        model = _model(Path(run), job)
        _check(source, model)
        target.mkdir(parents=True, exist_ok=True)
        _write(source, target / _MODEL)
        _write_config(model, target)
    return f"wrote {source.description}, {len(source.places)} tensors after {source.step} steps, to {target}"


def newest_weights(run: Path) -> WeightsSource:
    """Return the final model or the newest checkpoint; raises `WeightsError` if there is neither."""
    sources: list[WeightsSource] = []
    if (run / _MODEL).exists():
        sources.append(_from_model(run / _MODEL))
    reason = ""
    try:
        sources.append(_from_checkpoint(choose(run).checkpoint))
    except WeightsError as error:
        reason = str(error)
    if not sources:
        raise WeightsError(f"nothing to export: {run} has no {_MODEL}, and {reason}")
    return max(sources, key=lambda source: source.step)


def _from_model(path: Path) -> WeightsSource:
    with open_weights(path) as file:
        ties: dict[str, str] = json.loads(file.metadata.get("ties", "{}"))
        step = int(file.metadata.get("step", "0"))
        names = sorted(file.names)
    places = {name: (path, name) for name in names} | {name: (path, kept) for name, kept in ties.items()}
    return WeightsSource("the final model", step, places)


def _from_checkpoint(checkpoint: Checkpoint) -> WeightsSource:
    manifest = checkpoint.manifest
    where = {entry: path for file, path in zip(manifest.files, checkpoint.paths, strict=True) for entry in file.tensors}
    kept = {name: name for name in manifest.names} | manifest.ties
    missing = [name for name in kept.values() if f"weights/{name}" not in where]
    if missing:
        raise WeightsError(f"{checkpoint.folder} lacks the weights of {missing[0]}")
    places = {name: (where[f"weights/{at}"], f"weights/{at}") for name, at in kept.items()}
    return WeightsSource(f"the checkpoint {checkpoint.folder.name}", checkpoint.step, places)


def _write(source: WeightsSource, path: Path) -> None:
    """Write a file, one tensor at a time; `transformers` needs the format in its metadata."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, WeightsFile] = {
            place: stack.enter_context(open_weights(place)) for place in {place for place, _ in source.places.values()}
        }
        contents = [StateSpec(name, name, *files[place].spec_of(at)) for name, (place, at) in source.places.items()]
        with write_weights(path, contents, {"format": "pt"}) as writer:
            for name, (place, at) in source.places.items():
                writer.write(name, files[place].read(at))


def job_file(run: Path, job: Path | None, purpose: str) -> Path:
    """Return the run's job file, or the given one; raises `ValueError` if there is none."""
    known = run / "job.txt"
    if job is None and known.exists():
        job = Path(known.read_text().strip())
    if job is None or not job.exists():
        reason = "the run does not name its job file" if job is None else f"{job} does not exist"
        raise ValueError(f"{reason}; {purpose}: give the job file with --job")
    return job


def _model(run: Path, job: Path | None) -> nn.Module:
    """Return the job's model; a model that is built by a function gets no memory for its weights."""
    model = load_job(job_file(run, job, "a directory needs the model's configuration")).job.model
    if isinstance(model, nn.Module):
        return model
    with torch.device("meta"):
        return model()


def _check(source: WeightsSource, model: nn.Module) -> None:
    """Raise `ValueError` unless the model has a configuration and the names of the source."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        raise ValueError(
            f"{type(model).__name__} has no configuration that `transformers` could read: export to a file, such as "
            f"--to {_MODEL}"
        )
    names = set(model.state_dict())
    if names != source.places.keys():
        name = min(names ^ source.places.keys())
        owner = "the model" if name in names else "the run"
        raise ValueError(f"the job's model is not that of the run: only {owner} has {name}")


def _write_config(model: nn.Module, folder: Path) -> None:
    config: Any = model.config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
