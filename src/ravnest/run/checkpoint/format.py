"""Format of checkpoints: the state of all stages of a cluster after the same update, in one directory.

    RUN/checkpoints/step-000100/stage-0.safetensors     whole state of a stage (`pipeline.state`)
                                manifest.json           model, optimizer, plan, and the digest of every file
                    frozen-....safetensors              tensors that training does not change, if there are any

A checkpoint is written to a hidden directory, which gets its name when all files are complete and on the disk. Stages
with other cuts can read it: a tensor is found by the name of its parameter, in any of the files. Frozen tensors, and
those that no stage uses, are the same in all checkpoints of a run and are stored once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ravnest.core.host import sync_directory
from ravnest.errors import WeightsError
from ravnest.graph import Program
from ravnest.graph.weights import open_weights
from ravnest.pipeline.optimizers import Optimizer
from ravnest.pipeline.state import updates_in

__all__ = [
    "Checkpoint",
    "Draft",
    "Manifest",
    "StateFile",
    "checkpoint_directory",
    "checkpoints_in",
    "choose",
    "clear_drafts",
    "describe_file",
    "fingerprint",
    "prune",
]

FORMAT = "ravnest-checkpoint/3"
_READABLE = (FORMAT, "ravnest-checkpoint/2")  # whose state files have the frozen tensors too
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
    """Describes a checkpoint: after `step` updates of its cluster, the run had made `batches` steps, one per batch.

    `names` are the stored names of the model's state dict, in its order; `ties` maps the other names to them. `cuts`,
    `depths` and `delays` belong to the plan that was trained; a resumed run may have another plan. `frozen` is the file
    next to the checkpoint's directory with the tensors that training does not change.
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
    frozen: StateFile | None = None

    def __post_init__(self) -> None:
        if self.format not in _READABLE:
            raise ValueError(f"format is {self.format!r}, this release reads {FORMAT!r}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Steps of the run, which are batches of its data; with several clusters more than the updates of each."""
        return self.manifest.batches

    @property
    def updates(self) -> int:
        """Updates of the cluster whose state it is."""
        return self.manifest.step

    @property
    def run(self) -> Path:
        return self.folder.parent.parent

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.folder / file.name for file in self.manifest.files)

    @property
    def frozen_path(self) -> Path | None:
        """The path of the frozen tensors; None if the checkpoint refers to none."""
        return None if self.manifest.frozen is None else self.folder.parent / self.manifest.frozen.name

    @property
    def places(self) -> dict[str, Path]:
        """The file of each entry."""
        return {entry: path for file, path in self._described() for entry in file.tensors}

    def _described(self) -> Iterator[tuple[StateFile, Path]]:
        yield from zip(self.manifest.files, self.paths, strict=True)
        if self.manifest.frozen is not None and self.frozen_path is not None:
            yield self.manifest.frozen, self.frozen_path

    def problem(self) -> str | None:
        """Read all files; return the reason why the checkpoint cannot be used, or None."""
        for file, path in self._described():
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

    def __init__(self, run: Path, step: int, updates: int) -> None:
        """`step` is that of the run, `updates` are those of the cluster whose state it is."""
        self.step, self.updates = step, updates
        self._final = run / _FOLDER / f"step-{step:06}"
        self.folder = self._final.with_name(f".{self._final.name}.{os.getpid()}")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def stage(self, index: int) -> Path:
        """Return the path for the state of a stage."""
        return self.folder / f"stage-{index}.safetensors"

    def complete(self, manifest: Manifest) -> Checkpoint:
        """Write the manifest of the files, and give the checkpoint its name; `manifest.frozen` exists already."""
        files = tuple(self._described(path) for path in sorted(self.folder.glob("*.safetensors")))
        manifest = msgspec.structs.replace(manifest, step=self.updates, batches=self.step, files=files)
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
            updates = updates_in(file, path)
        if updates != self.updates:
            raise WeightsError(f"{path} has the state after {updates} updates, expected {self.updates}")
        return describe_file(path, path.name)


def describe_file(path: Path, name: str) -> StateFile:
    """Read a file and describe it for a manifest; `name` may contain its digest."""
    with open_weights(path) as file:
        names = tuple(sorted(file.names))
    digest = _digest(path)
    return StateFile(name=name.format(digest=digest), digest=digest, num_bytes=path.stat().st_size, tensors=names)


def checkpoint_directory(run: Path) -> Path:
    """Return the directory of a run's checkpoints."""
    return run / _FOLDER


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
