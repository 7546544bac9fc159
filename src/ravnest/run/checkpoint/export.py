"""Exports the weights of a run: one file with the model's own names, or a directory for `from_pretrained`.

The weights are those of the final model or of the newest checkpoint, whichever has more steps. A file has every name of
the model's state dict, including tied ones. A directory also has the model's configuration; the job file is run for it,
on this machine, as for training. Of a model with an adapter of peft, a directory has the adapter alone, or the model
with the adapter merged into it (`run.checkpoint.adapter`). Tensors are written one at a time.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ravnest.core.config import require
from ravnest.core.units import parse_bytes
from ravnest.errors import WeightsError
from ravnest.graph import StateSpec, write_weights
from ravnest.graph.pretrained import Pretrained
from ravnest.graph.program import dtype_name
from ravnest.graph.weights import WeightsFile, open_weights
from ravnest.run.checkpoint.adapter import AdapterModel, is_adapter_model
from ravnest.run.checkpoint.format import Checkpoint, choose
from ravnest.run.job import Job
from ravnest.run.job_file import load_job

__all__ = ["export", "job_of", "newest_weights"]

_MODEL, _INDEX = "model.safetensors", "model.safetensors.index.json"
_METADATA = {"format": "pt"}  # needed by `transformers`


@dataclass(frozen=True)
class WeightsSource:
    """The place of each tensor: name in the model -> (file, name in the file). `ties` are other names of tensors."""

    description: str
    step: int
    places: Mapping[str, tuple[Path, str]]
    ties: Mapping[str, str]

    @contextlib.contextmanager
    def open(self) -> Iterator[_OpenSource]:
        with contextlib.ExitStack() as stack:
            paths = {place for place, _ in self.places.values()}
            yield _OpenSource(self.places, {path: stack.enter_context(open_weights(path)) for path in paths})


@dataclass(frozen=True)
class _OpenSource:
    places: Mapping[str, tuple[Path, str]]
    files: Mapping[Path, WeightsFile]

    def spec(self, name: str) -> StateSpec:
        path, at = self.places[name]
        return StateSpec(name, name, *self.files[path].spec_of(at))

    def read(self, name: str) -> Tensor:
        path, at = self.places[name]
        return self.files[path].read(at)


def export(
    run: Path | str, to: str, job: Path | None = None, *, merge: bool = False, max_shard_size: str = "5GB"
) -> str:
    """Write the weights of a run; return a message that describes the result.

    Args:
        run: Directory of a run, or of one of its checkpoints.
        to: A file `NAME.safetensors`, or a directory.
        job: The job file, for a directory, if the run does not name it.
        merge: Merge the adapter of a peft model into its weights.
        max_shard_size: Bytes of a file in a directory, at most, unless a single tensor has more.
    """
    source, target = newest_weights(Path(run)), Path(to)
    if target.suffix == ".safetensors":
        require(not merge, "--merge needs a directory: the file has the model's own names")
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open() as opened:
            _write(target, [opened.spec(name) for name in source.places], _pairs(opened, source.places))
        return _result(source, len(source.places), target)
    max_bytes = parse_bytes(max_shard_size)
    model, base = _model(Path(run), job)
    if not is_adapter_model(model):
        _check_config(model)
    _check_names(source, model)
    if is_adapter_model(model):
        return _export_adapter(source, AdapterModel(model, base), target, merge=merge, max_bytes=max_bytes)
    require(not merge, f"--merge needs a model with an adapter of peft, the job's is a {type(model).__name__}")
    names = [name for name in source.places if name not in source.ties]
    with source.open() as opened:
        _write_shards(target, [opened.spec(name) for name in names], _pairs(opened, names), max_bytes)
    _write_config(model, target)
    return _result(source, len(names), target)


def _result(source: WeightsSource, num_tensors: int, target: Path, what: str = "") -> str:
    return f"wrote {what}{source.description}, {num_tensors} tensors after {source.step} steps, to {target}"


def _export_adapter(source: WeightsSource, model: AdapterModel, target: Path, *, merge: bool, max_bytes: int) -> str:
    with source.open() as opened:
        if not merge:
            tensors = model.adapter_tensors(opened.read)
            target.mkdir(parents=True, exist_ok=True)
            specs = [StateSpec(n, n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()]
            _write(target / "adapter_model.safetensors", specs, tensors.items())
            model.save_adapter_config(target)
            return _result(source, len(tensors), target, "the adapter of ")
        _check_config(model.base)
        merged = model.merged_names(source.ties)
        specs = [_renamed(opened.spec(name), to) for name, to in merged.items()]
        _write_shards(target, specs, model.merged_tensors(merged, opened.read), max_bytes)
    _write_config(model.base, target, is_untied=model.is_untied)
    return _result(source, len(specs), target, "the merged model of ")


def _renamed(item: StateSpec, name: str) -> StateSpec:
    return StateSpec(name, name, item.dtype, item.shape)


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
    return WeightsSource("the final model", step, places, ties)


def _from_checkpoint(checkpoint: Checkpoint) -> WeightsSource:
    manifest, where = checkpoint.manifest, checkpoint.places
    kept = {name: name for name in manifest.names} | manifest.ties
    missing = [name for name in kept.values() if f"weights/{name}" not in where]
    if missing:
        raise WeightsError(f"{checkpoint.folder} lacks the weights of {missing[0]}")
    places = {name: (where[f"weights/{at}"], f"weights/{at}") for name, at in kept.items()}
    return WeightsSource(f"the checkpoint {checkpoint.folder.name}", checkpoint.step, places, manifest.ties)


def _pairs(opened: _OpenSource, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    return ((name, opened.read(name)) for name in names)


def _write(path: Path, specs: Iterable[StateSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    with write_weights(path, specs, _METADATA) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)


def _write_shards(folder: Path, specs: list[StateSpec], tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
    """Write files of at most `max_bytes` and their index; a single file has no index. `tensors` may have any order."""
    shards = _shards(specs, max_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    names = [_MODEL] if len(shards) == 1 else [
        f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))
    ]  # fmt: skip
    file_of = {item.target: name for shard, name in zip(shards, names, strict=True) for item in shard}
    with contextlib.ExitStack() as stack:
        writers = {
            name: stack.enter_context(write_weights(folder / name, shard, _METADATA))
            for shard, name in zip(shards, names, strict=True)
        }
        for name, tensor in tensors:
            writers[file_of[name]].write(name, tensor)
    (folder / _INDEX).unlink(missing_ok=True)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(item.num_bytes for item in specs)}, "weight_map": file_of}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(specs: Iterable[StateSpec], max_bytes: int) -> list[list[StateSpec]]:
    shards: list[list[StateSpec]] = [[]]
    num_bytes = 0
    for item in specs:
        if shards[-1] and num_bytes + item.num_bytes > max_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(item)
        num_bytes += item.num_bytes
    return shards


def job_of(run: Path, job: Path | None, purpose: str) -> Job:
    """Return the job of the run's job file, with the arguments it had, or of the given file.

    Raises `ValueError` if it does not exist.
    """
    known, arguments = run / "job.txt", list[str]()
    if job is None and known.exists():
        name, _, rest = known.read_text().strip().partition("\n")
        job, arguments = Path(name), msgspec.json.decode(rest or "[]", type=list[str])
    if job is None or not job.exists():
        reason = "the run does not name its job file" if job is None else f"{job} does not exist"
        raise ValueError(f"{reason}; {purpose}: give the job file with --job")
    return load_job(job, arguments).job


def _model(run: Path, job: Path | None) -> tuple[nn.Module, str]:
    """Return the job's model and the folder it started from; one that a function builds gets no memory for weights."""
    model = job_of(run, job, "a directory needs the model's configuration").model
    if isinstance(model, nn.Module):
        return model, ""
    with torch.device("meta"):
        return (model.builder(), str(model.folder)) if isinstance(model, Pretrained) else (model(), "")


def _check_config(model: nn.Module) -> None:
    """Raise `ValueError` unless the model has a configuration."""
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        raise ValueError(
            f"{type(model).__name__} has no configuration that `transformers` could read: export to a file, such as "
            f"--to {_MODEL}"
        )


def _check_names(source: WeightsSource, model: nn.Module) -> None:
    """Raise `ValueError` unless the model has the names of the source."""
    names = set(model.state_dict())
    if names != source.places.keys():
        name = min(names ^ source.places.keys())
        owner = "the model" if name in names else "the run"
        raise ValueError(f"the job's model is not that of the run: only {owner} has {name}")


def _write_config(model: nn.Module, folder: Path, *, is_untied: bool = False) -> None:
    config: Any = copy.deepcopy(model.config)  # the job's own stays as it is
    config.architectures = [type(model).__name__]
    if is_untied:
        config.tie_word_embeddings = False
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
