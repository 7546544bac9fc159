"""A run's weights for use elsewhere: one file with the model's own names, or a folder for `from_pretrained`.

The weights are those of the final model or of the newest checkpoint, whichever has seen more steps. A file has every
name of the model's state dict, tied ones too. A folder has the model's configuration besides, for which the job's own
file is run: on this machine, as for training.
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
from ravnest.run.job import load_job

__all__ = ["export"]

_MODEL = "model.safetensors"


@dataclass(frozen=True)
class _Source:
    """Where each tensor is: names of the model -> (file, name in it)."""

    what: str
    step: int
    places: Mapping[str, tuple[Path, str]]


def export(run: Path | str, to: str, job: Path | None = None) -> str:
    """Write the weights of a run; what was written, in words."""
    source, target = _newest(Path(run)), Path(to)
    if target.suffix == ".safetensors":
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(source, target)
    else:
        model = _model(Path(run), job)
        _check(source, model)
        target.mkdir(parents=True, exist_ok=True)
        _write(source, target / _MODEL)
        _write_config(model, target)
    return f"{source.what}, {len(source.places)} tensors after {source.step} steps, is in {target}"


def _newest(run: Path) -> _Source:
    """The final model or the newest checkpoint; refused if there is neither."""
    found: list[_Source] = []
    if (run / _MODEL).exists():
        found.append(_from_model(run / _MODEL))
    reason = ""
    try:
        found.append(_from_checkpoint(choose(run).checkpoint))
    except WeightsError as error:
        reason = str(error)
    if not found:
        raise WeightsError(f"there is nothing to export: no {_MODEL}, and {reason}")
    return max(found, key=lambda source: source.step)


def _from_model(path: Path) -> _Source:
    with open_weights(path) as file:
        ties: dict[str, str] = json.loads(file.metadata.get("ties", "{}"))
        step = int(file.metadata.get("step", "0"))
        names = sorted(file.names)
    places = {name: (path, name) for name in names} | {name: (path, kept) for name, kept in ties.items()}
    return _Source("the final model", step, places)


def _from_checkpoint(checkpoint: Checkpoint) -> _Source:
    manifest = checkpoint.manifest
    where = {entry: path for file, path in zip(manifest.files, checkpoint.paths, strict=True) for entry in file.tensors}
    kept = {name: name for name in manifest.names} | manifest.ties
    missing = [name for name in kept.values() if f"weights/{name}" not in where]
    if missing:
        raise WeightsError(f"{checkpoint.folder} has no weights of {missing[0]}")
    places = {name: (where[f"weights/{at}"], f"weights/{at}") for name, at in kept.items()}
    return _Source(f"the checkpoint {checkpoint.folder.name}", checkpoint.step, places)


def _write(source: _Source, path: Path) -> None:
    """A tensor at a time. The format is how `transformers` knows that it is a file of torch's."""
    with contextlib.ExitStack() as stack:
        files: dict[Path, WeightsFile] = {
            place: stack.enter_context(open_weights(place)) for place in {place for place, _ in source.places.values()}
        }
        contents = [StateSpec(name, name, *files[place].spec_of(at)) for name, (place, at) in source.places.items()]
        with write_weights(path, contents, {"format": "pt"}) as writer:
            for name, (place, at) in source.places.items():
                writer.write(name, files[place].read(at))


def _model(run: Path, job: Path | None) -> nn.Module:
    """The job's model, without memory for its weights."""
    known = run / "job.txt"
    if job is None and known.exists():
        job = Path(known.read_text().strip())
    if job is None or not job.exists():
        gone = "" if job is None else f"{job} is not there. "
        raise ValueError(f"{gone}To write a folder the model's configuration is needed: give the job file with --job")
    model = load_job(job).job.model
    if isinstance(model, nn.Module):
        return model
    with torch.device("meta"):
        return model()


def _check(source: _Source, model: nn.Module) -> None:
    """Before anything is written."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        raise ValueError(
            f"{type(model).__name__} has no configuration that `transformers` could read: export to a file, such as "
            f"--to {_MODEL}"
        )
    names = set(model.state_dict())
    if names != source.places.keys():
        other = min(names ^ source.places.keys())
        whose = "the model" if other in names else "the run"
        raise ValueError(f"the job's model is not that of the run: only {whose} has {other}")


def _write_config(model: nn.Module, folder: Path) -> None:
    config: Any = model.config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
