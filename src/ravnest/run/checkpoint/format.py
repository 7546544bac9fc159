"""Checkpoints of a run: what all stages had learnt after the same update, in folders that are complete or not there.

    RUN/checkpoints/step-000100/stage-0.safetensors     a stage's whole state (`runtime.statefile`)
                                unused.safetensors      what no stage uses, if there is any
                                manifest.json           what this is of, and the digest of every file

A checkpoint is written in a hidden folder, which gets its name when everything is in it and on the disk. It may be
read by stages that are cut otherwise: a tensor is found by its parameter's name, in whichever file it is.

A model's weights between the requester's files and the stages: split at the start, put together at the end.
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
    """A strict record."""


class StateFile(_Data, frozen=True, kw_only=True):
    """One file: `digest` is its SHA-256, `tensors` the names of what is in it."""

    name: str
    digest: str
    num_bytes: int
    tensors: tuple[str, ...]

    def __post_init__(self) -> None:
        if _FILE.fullmatch(self.name) is None:  # never a path to somewhere else
            raise ValueError(f"{self.name!r} is no name of a state file")


class Manifest(_Data, frozen=True, kw_only=True):
    """What a checkpoint is of. After `step` updates, `batches` batches of the data had been used.

    `names` are those of the model's own state dict that are kept, in its order, and `ties` maps the others to them.
    `cuts`, `depths` and `delays` are how it was trained, which need not be how it is trained on.
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
            raise ValueError(f"its format is {self.format!r}, this release reads {FORMAT!r}")


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete."""

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
        """Why its files cannot be trusted, if so; reads all of them."""
        for file, path in zip(self.manifest.files, self.paths, strict=True):
            try:
                if path.stat().st_size != file.num_bytes:
                    return f"{path} has {path.stat().st_size} bytes and should have {file.num_bytes}"
                if _digest(path) != file.digest:
                    return f"{path} has been changed or damaged: its digest is another"
            except OSError as error:
                return f"{path} cannot be read: {error}"
        return None


class Draft:
    """A checkpoint that is being written. Raises `OSError` if there is no room for it."""

    def __init__(self, run: Path, step: int) -> None:
        self.step = step
        self._final = run / _FOLDER / f"step-{step:06}"
        self.folder = self._final.with_name(f".{self._final.name}.{os.getpid()}")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def stage(self, index: int) -> Path:
        """Where a stage is to write its state."""
        return self.folder / f"stage-{index}.safetensors"

    @property
    def unused(self) -> Path:
        return self.folder / "unused.safetensors"

    def complete(self, manifest: Manifest) -> Checkpoint:
        """Describe the files that are there, and give the checkpoint its name."""
        files = tuple(self._described(path) for path in sorted(self.folder.glob("*.safetensors")))
        manifest = msgspec.structs.replace(manifest, step=self.step, files=files)
        with (self.folder / _MANIFEST).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self.folder)
        _remove(self._final)  # of a run that went another way from an earlier checkpoint
        self.folder.replace(self._final)
        sync_directory(self._final.parent)
        return Checkpoint(self._final, manifest)

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _described(self, path: Path) -> StateFile:
        with open_weights(path) as file:
            updates, names = updates_in(file, path), tuple(sorted(file.names))
        if updates != self.step:
            raise WeightsError(f"{path} is after {updates} updates, the checkpoint after {self.step}")
        return StateFile(name=path.name, digest=_digest(path), num_bytes=path.stat().st_size, tensors=names)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, and why newer ones were passed over."""

    checkpoint: Checkpoint
    passed_over: tuple[str, ...] = ()


def choose(path: Path | str) -> Choice:
    """The newest checkpoint of a run whose files are as they were written; or the one that is named."""
    path = Path(path).resolve()
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    if _NAME.fullmatch(path.name):
        named = _read(path)
        if isinstance(named, str) or (named_problem := named.problem()) is not None:
            raise WeightsError(f"{path} cannot be used: {named if isinstance(named, str) else named_problem}")
        return Choice(named)
    passed: list[str] = []
    for folder in reversed(_folders(path)):
        found = _read(folder)
        problem = found if isinstance(found, str) else found.problem()
        if isinstance(found, Checkpoint) and problem is None:
            return Choice(found, tuple(passed))
        passed.append(f"{folder.name} was passed over: {problem}")
    why = "; ".join(passed) or "a run makes them with --checkpoint-every"
    raise WeightsError(f"{path} has no checkpoint that can be used: {why}")


def checkpoints_in(run: Path) -> list[Checkpoint]:
    """All that are complete, the oldest first; their files are not read."""
    return [found for folder in _folders(run) if isinstance(found := _read(folder), Checkpoint)]


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest."""
    for folder in _folders(run)[:-keep]:
        _remove(folder)


def clear_drafts(run: Path) -> None:
    """Remove what a run that was killed has left half written; no other may be writing."""
    for path in (run / _FOLDER).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def fingerprint(program: Program) -> str:
    """Tells whether two programs compute the same from parameters of the same names and shapes."""
    parts = (program.inputs, program.outputs, program.state, program.ops, program.idle, sorted(program.ties.items()))
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


def _folders(run: Path) -> Sequence[Path]:
    found = [path for path in (run / _FOLDER).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _read(folder: Path) -> Checkpoint | str:
    """Return the checkpoint, or the reason why it cannot be used."""
    try:
        return Checkpoint(folder, msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest))
    except (OSError, ValueError) as error:
        return f"its {_MANIFEST} cannot be read: {error}"


def _remove(folder: Path) -> None:
    """At once for whoever looks, then file by file."""
    hidden = folder.with_name(f".{folder.name}.old")
    with contextlib.suppress(FileNotFoundError):
        folder.replace(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_first_weights(program: Program, stage: Stage, path: Path) -> bool:
    """A model that exists gives each stage its tensors in a file; a builder's stages make their own (False)."""
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
    """One file with the model's names out of the stages' files, a tensor at a time. What no stage uses is kept."""
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
    """What the model has and no stage uses."""
    idle: list[StateSpec] = [s for s in program.idle if s.persistent]
    tensors = {s.target: program.tensors[s.target] for s in idle}
    if program.init_log is None or not idle:
        return {name: tensor.detach() for name, tensor in tensors.items()}
    return replay(program.init_log.init_for(tensors), set(tensors), seed)
