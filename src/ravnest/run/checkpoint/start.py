"""The tensors that a run starts from: those of its model, and of the checkpoint that it resumes from.

Frozen tensors never change. They are not part of the state that stages send; the requester keeps them, and writes them
once for all checkpoints of a run:

    RUN/checkpoints/frozen-0123456789abcdef.safetensors      named after its digest, which every manifest has

A resumed run takes them from there, even if the job's model has other values by then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from ravnest.graph import Program, Stage, write_weights
from ravnest.graph.program import StateSpec
from ravnest.graph.weights import WeightsFile, iterate_weights, open_weights, start_tensors
from ravnest.pipeline.state import owned
from ravnest.run.checkpoint.format import Checkpoint, StateFile, checkpoint_directory, describe_file

__all__ = ["StartWeights", "frozen_state", "gather"]

_METADATA = {"format": "ravnest-frozen/1"}


def frozen_state(program: Program) -> list[StateSpec]:
    """The tensors of a model that training leaves as they are, without buffers that stages make for themselves."""
    used = [s for s in program.state if s.is_frozen and (s.persistent or not program.is_self_initialising)]
    return [*used, *(s for s in program.idle if s.persistent)]


class StartWeights:
    """The initial tensors of a program; those that never change are of `checkpoint`, if the run resumes from one."""

    def __init__(self, program: Program, seed: int, checkpoint: Checkpoint | None = None) -> None:
        self._program, self._seed, self._checkpoint = program, seed, checkpoint
        self._unchanged = {s.target for s in program.state if s.is_frozen} | {s.target for s in program.idle}
        self._lock = threading.Lock()  # guards the next
        self._frozen: StateFile | None = None

    def read(self, specs: Iterable[StateSpec]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by name, one at a time where they are read from files."""
        specs = list(specs)
        places = {} if self._checkpoint is None else self._checkpoint.places
        stored = {s.target for s in specs if s.target in self._unchanged and f"weights/{s.target}" in places}
        with contextlib.ExitStack() as stack:
            files: dict[Path, WeightsFile] = {}
            for name in sorted(stored, key=lambda name: str(places[f"weights/{name}"])):
                entry = f"weights/{name}"
                if places[entry] not in files:
                    files[places[entry]] = stack.enter_context(open_weights(places[entry]))
                yield name, files[places[entry]].read(entry)
        yield from start_tensors(self._program, (s for s in specs if s.target not in stored), self._seed)

    def write_stage(self, stage: Stage, path: Path, *, frozen_only: bool) -> bool:
        """Write the tensors that a stage needs to start; false if it needs none, or makes them itself."""
        contents = [s for s in owned(stage).values() if s.is_frozen or not frozen_only]
        if self._program.is_self_initialising or not contents:
            return False
        _write(path, contents, self.read(contents), {})
        return True

    def write_frozen(self, run: Path) -> StateFile | None:
        """Write the frozen tensors to the run's directory, once; return the description of that file."""
        with self._lock:
            if self._frozen is None or not (checkpoint_directory(run) / self._frozen.name).exists():
                self._frozen = self._link_frozen(run) or self._write_frozen(run)
            return self._frozen

    def _link_frozen(self, run: Path) -> StateFile | None:
        """Use the file of the checkpoint that the run resumes from."""
        if self._checkpoint is None or (frozen := self._checkpoint.manifest.frozen) is None:
            return None
        source, target = self._checkpoint.folder.parent / frozen.name, checkpoint_directory(run) / frozen.name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.hardlink_to(source)
            except OSError:
                draft = target.with_name(f".{target.name}.{os.getpid()}")
                shutil.copyfile(source, draft)
                draft.replace(target)
        return frozen

    def _write_frozen(self, run: Path) -> StateFile | None:
        specs = frozen_state(self._program)
        if not specs:
            return None
        contents = [msgspec.structs.replace(s, target=f"weights/{s.target}") for s in specs]
        draft = checkpoint_directory(run) / f".frozen.{os.getpid()}.safetensors"
        draft.parent.mkdir(parents=True, exist_ok=True)
        _write(draft, contents, ((f"weights/{name}", tensor) for name, tensor in self.read(specs)), _METADATA)
        frozen = describe_file(draft, "frozen-{digest:.16}.safetensors")
        draft.replace(draft.with_name(frozen.name))
        return frozen


def _write(
    path: Path, contents: Collection[StateSpec], tensors: Iterable[tuple[str, Tensor]], metadata: dict[str, str]
) -> None:
    with write_weights(path, contents, metadata) as writer:
        for name, tensor in tensors:
            writer.write(name, tensor)


def gather(
    program: Program, stages: Sequence[Stage], parts: Sequence[Path], path: Path, start: StartWeights, *, step: int = 0
) -> None:
    """Assemble the model's file, one tensor at a time, from the files of its stages and the tensors they left as is."""
    contents = {s.target: s for s in (*program.state, *program.idle) if s.persistent}
    metadata = {"ties": msgspec.json.encode(dict(program.ties)).decode(), "step": str(step)}
    trained = {name for name, item in contents.items() if not item.is_frozen} - {s.target for s in program.idle}
    with write_weights(path, contents.values(), metadata) as writer:
        for stage, part in zip(stages, parts, strict=True):
            for name, tensor in iterate_weights(stage, part, trained):
                writer.write(name, tensor)
        for name, tensor in start.read(contents[name] for name in sorted(writer.missing)):
            writer.write(name, tensor)
