"""Format of checkpoints: the state of all stages of a cluster after the same update, in one directory.

    RUN/checkpoints/step-000100/stage-0.safetensors     whole state of a stage (`pipeline.state`)
                                unused.safetensors      tensors that no stage uses, if there are any
                                manifest.json           model, optimizer, plan, and the digest of every file

A checkpoint is written to a hidden directory, which gets its name when all files are complete and on the disk. Stages
with other cuts can read it: a tensor is found by the name of its parameter, in any of the files.

The module also splits the weights of a given model into files of stages, and assembles the final model from them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from ravnest.core.host import sync_directory
from ravnest.errors import WeightsError
from ravnest.graph import Program, Stage, stage_weights, write_weights
from ravnest.graph.program import StateSpec
from ravnest.graph.weights import iterate_weights, open_weights, replay
from ravnest.pipeline.optimizers import Optimizer
from ravnest.pipeline.state import updates_in

__all__ = [
    "Checkpoint",
    "Draft",
    "Manifest",
    "checkpoints_in",
    "choose",
    "clear_drafts",
    "fingerprint",
    "prune",
    "gather",
    "unused_tensors",
    "write_first_weights",
]

FORMAT = "ravnest-checkpoint/2"
_FOLDER, _MANIFEST = "checkpoints", "manifest.json"
_NAME = re.compile(r"step-(\d{6,12})")
_FILE = re.compile(r"[a-z0-9][a-z0-9-]*\.safetensors")


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen record that rejects unknown fields."""


class StateFile(_Data, frozen=True, kw_only=True):
    """One file: `digest` is its SHA-256, `tensors` the names of its tensors."""

    name: str
    digest: str
    num_bytes: int
    tensors: tuple[str, ...]

    def __post_init__(self) -> None:
        if _FILE.fullmatch(self.name) is None:  # never a path to another directory
            raise ValueError(f"name must be that of a state file, such as stage-0.safetensors, got {self.name!r}")


class Manifest(_Data, frozen=True, kw_only=True):
    """Describes a checkpoint: after `step` updates, the run had used `batches` batches of the data.

    `names` are the stored names of the model's state dict, in its order; `ties` maps the other names to them. `cuts`,
    `depths` and `delays` belong to the plan that was trained; a resumed run may have another plan.
    """

    format: str = FORMAT
    step: int
    batches: int
    seed: int
    program: str
    optimizer: Optimizer
    names: tuple[str, ...]
    ties: dict[str, str]
    cuts: tuple[int, ...]
    accumulate: int
    depths: tuple[int, ...]
    delays: tuple[int, ...]
    files: tuple[StateFile, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format is {self.format!r}, this release reads {FORMAT!r}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def run(self) -> Path:
        return self.folder.parent.parent

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.folder / file.name for file in self.manifest.files)

    def problem(self) -> str | None:
        """Read all files; return the reason why the checkpoint cannot be used, or None."""
        for file, path in zip(self.manifest.files, self.paths, strict=True):
            try:
                if path.stat().st_size != file.num_bytes:
                    return f"{path} has {path.stat().st_size} bytes, expected {file.num_bytes}"
                if _digest(path) != file.digest:
                    return f"{path} is damaged: its digest differs from the manifest"
            except OSError as error:
                return f"{path} cannot be read: {error}"
        return None


class Draft:
    """A checkpoint that is being written. Raises `OSError` if the disk has no room for it."""

    def __init__(self, run: Path, step: int) -> None:
        self.step = step
        self._final = run / _FOLDER / f"step-{step:06}"
        self.folder = self._final.with_name(f".{self._final.name}.{os.getpid()}")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def stage(self, index: int) -> Path:
        """Return the path for the state of a stage."""
        return self.folder / f"stage-{index}.safetensors"

    @property
    def unused(self) -> Path:
        return self.folder / "unused.safetensors"

    def complete(self, manifest: Manifest) -> Checkpoint:
        """Write the manifest of the files, and give the checkpoint its name."""
        files = tuple(self._described(path) for path in sorted(self.folder.glob("*.safetensors")))
        manifest = msgspec.structs.replace(manifest, step=self.step, files=files)
        with (self.folder / _MANIFEST).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self.folder)
        _remove(self._final)  # of an earlier training of the same steps
        self.folder.replace(self._final)
        sync_directory(self._final.parent)
        return Checkpoint(self._final, manifest)

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _described(self, path: Path) -> StateFile:
        with open_weights(path) as file:
            updates, names = updates_in(file, path), tuple(sorted(file.names))
        if updates != self.step:
            raise WeightsError(f"{path} has the state after {updates} updates, expected {self.step}")
        return StateFile(name=path.name, digest=_digest(path), num_bytes=path.stat().st_size, tensors=names)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from, and the reasons why newer ones were skipped."""

    checkpoint: Checkpoint
    skipped: tuple[str, ...] = ()


def choose(path: Path | str) -> Choice:
    """Return the newest checkpoint of a run whose files are intact, or the one at `path`."""
    path = Path(path).resolve()
    if not path.is_dir():
        raise ValueError(f"the directory {path} does not exist")
    if _NAME.fullmatch(path.name):
        named = _read(path)
        if isinstance(named, str) or (named_problem := named.problem()) is not None:
            raise WeightsError(f"{path} cannot be used: {named if isinstance(named, str) else named_problem}")
        return Choice(named)
    skipped: list[str] = []
    for folder in reversed(_folders(path)):
        checkpoint = _read(folder)
        problem = checkpoint if isinstance(checkpoint, str) else checkpoint.problem()
        if isinstance(checkpoint, Checkpoint) and problem is None:
            return Choice(checkpoint, tuple(skipped))
        skipped.append(f"skipped {folder.name}: {problem}")
    reason = "; ".join(skipped) or "write checkpoints with --checkpoint-every"
    raise WeightsError(f"{path} has no usable checkpoint: {reason}")


def checkpoints_in(run: Path) -> list[Checkpoint]:
    """Return all complete checkpoints, the oldest first, without reading their tensors."""
    return [checkpoint for folder in _folders(run) if isinstance(checkpoint := _read(folder), Checkpoint)]


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for folder in _folders(run)[:-keep]:
        _remove(folder)


def clear_drafts(run: Path) -> None:
    """Remove incomplete checkpoints of a run that was killed. No other process may be writing one."""
    for path in (run / _FOLDER).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def fingerprint(program: Program) -> str:
    """Return a hash that is equal for programs with the same operations, parameter names and shapes."""
    parts = (program.inputs, program.outputs, program.state, program.ops, program.idle, sorted(program.ties.items()))
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def _folders(run: Path) -> Sequence[Path]:
    folders = [path for path in (run / _FOLDER).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


def _read(folder: Path) -> Checkpoint | str:
    """Return the checkpoint, or the reason why it cannot be used."""
    try:
        return Checkpoint(folder, msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest))
    except (OSError, ValueError) as error:
        return f"its {_MANIFEST} cannot be read: {error}"


def _remove(folder: Path) -> None:
    """Remove a checkpoint; it is hidden first, so that no reader finds an incomplete one."""
    hidden = folder.with_name(f".{folder.name}.old")
    with contextlib.suppress(FileNotFoundError):
        folder.replace(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# weights of the model, in files of stages


def write_first_weights(program: Program, stage: Stage, path: Path) -> bool:
    """Write the initial tensors of a stage; false if the model is a function, whose stages initialise their own."""
    if program.init_log is not None:
        return False
    tensors = stage_weights(program, stage)
    with write_weights(path, [s for s in stage.state if s.target in tensors]) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return True


def gather(
    program: Program, stages: Sequence[Stage], parts: Sequence[Path], path: Path, seed: int, *, step: int = 0
) -> None:
    """Assemble the model's file, one tensor at a time, from the files of its stages and the tensors that none uses."""
    contents = {s.target: s for s in (*program.state, *program.idle) if s.persistent}
    metadata = {"ties": json.dumps(dict(program.ties)), "step": str(step)}
    with write_weights(path, contents.values(), metadata) as writer:
        for name, tensor in unused_tensors(program, seed).items():
            writer.write(name, tensor)
        for stage, part in zip(stages, parts, strict=True):
            for name, tensor in iterate_weights(stage, part):
                if name in writer.missing:
                    writer.write(name, tensor)


def unused_tensors(program: Program, seed: int) -> dict[str, Tensor]:
    """Return the tensors of the model that no stage uses."""
    idle: list[StateSpec] = [s for s in program.idle if s.persistent]
    tensors = {s.target: program.tensors[s.target] for s in idle}
    if program.init_log is None or not idle:
        return {name: tensor.detach() for name, tensor in tensors.items()}
    return replay(program.init_log.init_for(tensors), set(tensors), seed)
