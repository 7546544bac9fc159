"""A stage's state in a safetensors file: complete or not there; of many tensors only those are read that are needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from torch import Tensor

from ..core.errors import WeightsError
from ..graph import Stage, State, write_weights
from ..graph.program import dtype_name
from ..graph.weights import WeightsFile, open_weights
from .state import StageState, check_entry, join, kind_and_name, owned

__all__ = ["FORMAT", "read_state", "select", "updates_in", "write_state"]

FORMAT = "ravnest-state/1"


def write_state(state: StageState, path: Path | str) -> None:
    """Write all of it; the file takes its name when it is complete."""
    contents = [State(e, e, dtype_name(t.dtype), tuple(t.shape)) for e, t in state.tensors.items()]
    with write_weights(path, contents, {"format": FORMAT, "updates": str(state.updates)}) as writer:
        for entry, tensor in state.tensors.items():
            writer.write(entry, tensor)


def read_state(stage: Stage, paths: Iterable[Path | str]) -> StageState:
    """What the stage needs out of the files of stages that may have been cut elsewhere.

    Shapes and dtypes are checked before anything is read. What is in several files is taken from the first; of files
    after different numbers of updates the smallest counts.
    """
    return join([_read(stage, path) for path in paths])


def _read(stage: Stage, path: Path | str) -> StageState:
    own = owned(stage)
    with open_weights(path) as file:
        updates = updates_in(file, path)
        wanted = sorted(entry for entry in file.names if kind_and_name(entry)[1] in own)
        for entry in wanted:
            try:
                check_entry(entry, own, *file.look_of(entry))
            except WeightsError as error:
                raise WeightsError(f"{path}: {error}") from None
        return StageState(updates, {entry: _in_memory(file, entry) for entry in wanted})


def select(source: Path | str, target: Path | str, names: Collection[str]) -> None:
    """A file with what a state file has of these parameters and buffers, a tensor at a time."""
    with open_weights(source) as file:
        updates_in(file, source)  # refuses what is no state
        contents = [State(e, e, *file.look_of(e)) for e in sorted(file.names) if kind_and_name(e)[1] in names]
        with write_weights(target, contents, file.metadata) as writer:
            for item in contents:
                writer.write(item.target, file.read(item.target))


def updates_in(file: WeightsFile, path: Path | str) -> int:
    """After how many updates a state was written."""
    said, updates = file.metadata.get("format"), file.metadata.get("updates", "")
    if said != FORMAT or not updates.isdecimal():
        raise WeightsError(f"{path} is not a state of format {FORMAT}: it says {said!r}, updates {updates!r}")
    return int(updates)


def _in_memory(file: WeightsFile, entry: str) -> Tensor:
    """Not in the file's: tensors there are aligned otherwise, which can change the last bits of what is computed."""
    return file.read(entry).clone()
