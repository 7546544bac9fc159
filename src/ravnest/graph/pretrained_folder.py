"""Folders of safetensors files, as `save_pretrained` writes them: one file, or shards and their index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.graph.weights import open_weights

__all__ = ["MergedTensor", "PretrainedFolder", "StoredTensor", "listed"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_NAMED = 3  # names listed in a message


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, under its name there."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def place(self) -> str:
        return str(self.path)

    def read(self) -> Tensor:
        with open_weights(self.path) as file:
            if file.spec_of(self.name) != (self.dtype, self.shape):
                raise WeightsError(f"{self.path} has changed since the job started: {self.name} is another tensor now")
            return file.read(self.name)


@dataclass(frozen=True)
class MergedTensor:
    """A tensor that the files have in parts: each row of parts is stacked, and the results are concatenated."""

    rows: tuple[tuple[StoredTensor, ...], ...]
    stack_dim: int | None  # None: a row has one part
    join_dim: int | None  # None: there is one row

    @property
    def dtype(self) -> str:
        return self.rows[0][0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._merged(lambda part: torch.empty(part.shape, device="meta")).shape)

    @property
    def place(self) -> str:
        return str(self.rows[0][0].path.parent)

    def read(self) -> Tensor:
        return self._merged(StoredTensor.read)

    def _merged(self, value: Callable[[StoredTensor], Tensor]) -> Tensor:
        rows = [
            value(row[0]) if self.stack_dim is None else torch.stack([value(part) for part in row], self.stack_dim)
            for row in self.rows
        ]
        return rows[0] if self.join_dim is None else torch.cat(rows, self.join_dim)


@dataclass(frozen=True)
class PretrainedFolder:
    """The tensors of a folder: their files, dtypes and shapes are known, and nothing else is read yet."""

    folder: Path
    tensors: Mapping[str, StoredTensor | MergedTensor]

    @staticmethod
    def open(folder: Path) -> PretrainedFolder:
        """Read the headers of all files; raises `WeightsError` if one is missing, cut off or malformed."""
        if not folder.is_dir():
            raise WeightsError(f"{folder} is not a directory: give one with {_SINGLE} or {_INDEX}")
        tensors: dict[str, StoredTensor | MergedTensor] = {}
        for path, names in _files_of(folder).items():
            with open_weights(path) as file:
                if absent := sorted(set(names or ()) - file.names):
                    raise WeightsError(f"{path} lacks {listed(absent)}, which {_INDEX} says it has")
                for name in names or file.names:
                    tensors[name] = StoredTensor(path, name, *file.spec_of(name))
        return PretrainedFolder(folder, tensors)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one at a time, file by file."""
        for name in sorted(names, key=lambda name: self.tensors[name].place):
            yield name, self.tensors[name].read()


def _files_of(folder: Path) -> dict[Path, list[str] | None]:
    """The files with their tensors according to the index; None: all tensors of the file."""
    index = folder / _INDEX
    if not index.exists():
        if (folder / _SINGLE).exists():
            return {folder / _SINGLE: None}
        if any((folder / name).exists() for name in _PICKLED):
            raise WeightsError(
                f"{folder} has pickled weights only, which can run code and are not read: load them with "
                "from_pretrained and write them with save_pretrained, which makes safetensors files"
            )
        raise WeightsError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = {name: str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of safetensors files: {error!r:.200}") from None
    by_path: dict[Path, list[str] | None] = {}
    for name, file in files.items():
        if Path(file).name != file or file in (".", "..") or "\\" in file:
            raise WeightsError(f"{index} names {file!r:.200}, which is not the name of a file in {folder}")
        by_path.setdefault(folder / file, []).append(name)  # type: ignore[union-attr]
    for path in by_path:
        if not path.exists():
            raise WeightsError(f"{folder} lacks {path.name}, which {_INDEX} names: it has {len(by_path)} shards")
    return by_path


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
