"""Weights of stages: initialised from a seed, or read and written as safetensors files, one tensor at a time.

A stage's tensors are made by its init list (bit-equal to those of the whole model built with that seed) or read from a
file that may contain the whole model. No process ever needs memory for the whole model. A file appears under its name
only when it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.graph.interpreter import decode, run_op
from ravnest.graph.ops import resolve
from ravnest.graph.program import DTYPES, Draw, Init, Program, Stage, StateSpec, refs

__all__ = [
    "WeightsFile",
    "WeightsWriter",
    "initialise",
    "iterate_weights",
    "open_weights",
    "read_weights",
    "replay",
    "stage_weights",
    "start_tensors",
    "write_weights",
]

_CPU = torch.device("cpu")
_GROUP_BYTES = 1 << 30  # of initial tensors that are made at a time
_ALIGNMENT = 64  # of tensors in memory: torch's kernels may round differently for others
_CHUNK = 1 << 20  # a multiple of 16, the numbers torch draws at a time
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def stage_weights(program: Program, stage: Stage) -> dict[str, Tensor]:
    """The model's tensors that a stage starts with: the parameters it owns, and its buffers."""
    assert program.init_log is None, "a program traced from a builder has no weights: use initialise"
    return {s.target: program.tensors[s.target].detach() for s in stage.state if s.owner == stage.index}


def start_tensors(program: Program, specs: Iterable[StateSpec], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the values that training starts from, by name: those of the model, of its files, or drawn from the seed.

    Tensors in files are read one at a time. Those that a builder makes are made in groups of limited size.
    """
    specs = list(specs)
    if program.init_log is None:
        yield from ((item.target, program.tensors[item.target].detach()) for item in specs)
        return
    sources = {} if program.pretrained is None else program.pretrained.sources
    if program.pretrained is not None:
        yield from program.pretrained.read(item for item in specs if item.target in sources)
    for group in _groups([item for item in specs if item.target not in sources]):
        yield from _made(program, group, seed).items()


def _made(program: Program, group: Sequence[StateSpec], seed: int) -> dict[str, Tensor]:
    assert program.init_log is not None
    targets = {item.target: program.tensors[item.target] for item in group}
    if program.pretrained is None:
        return replay(program.init_log.init_for(targets), set(targets), seed)
    specs = {s.target: s for s in (*program.state, *program.idle) if s.target in program.pretrained.sources}
    others = {name: tensor for name, tensor in program.tensors.items() if name not in specs}
    init = program.init_log.init_beside({name: program.tensors[name] for name in specs}, targets, others)
    read = dict.fromkeys(name for op in init.ops for name in refs(op) if name in specs)
    return replay(init, set(targets), seed, dict(program.pretrained.read(specs[name] for name in read)))


def _groups(specs: Sequence[StateSpec]) -> Iterator[list[StateSpec]]:
    """Split tensors into groups of at most `_GROUP_BYTES`, or of one tensor."""
    group: list[StateSpec] = []
    for item in specs:
        if group and sum(other.num_bytes for other in group) + item.num_bytes > _GROUP_BYTES:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def initialise(stage: Stage, seed: int) -> dict[str, Tensor]:
    """The stage's tensors, bit-equal to those of `torch.manual_seed(seed)` and the builder."""
    assert stage.init is not None, "a stage traced from an existing model has no init list: use stage_weights"
    return replay(stage.init, {s.target for s in stage.state}, seed)


def replay(init: Init, targets: set[str], seed: int, loaded: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Make `targets` by running an init list on `loaded` tensors; the global random state is left unchanged."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        return _replay(init, targets, loaded or {})


def _replay(init: Init, targets: set[str], loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    env: dict[str, Any] = dict(loaded)
    draws = iter(init.draws)
    draw = next(draws, None)
    last = {name: i for i, op in enumerate(init.ops) for name in (*refs(op), *op.outs)}
    for i, op in enumerate(init.ops):
        while draw is not None and draw.at <= i:
            _discard(draw)
            draw = next(draws, None)
        run_op(op, env, _CPU)
        for name in {n for n in (*refs(op), *op.outs) if n and last[n] == i and n not in targets}:
            del env[name]
    return env


def _discard(draw: Draw) -> None:
    """Draw the random numbers of another stage, in chunks."""
    function = resolve(draw.op)
    args = [decode(a, _CPU) for a in draw.args]
    if not draw.op.split(".")[1].endswith("_"):
        function(*args)
        return
    count, dtype = prod(draw.shape), DTYPES[draw.dtype]
    if draw.op not in ("aten.normal_.default", "aten.uniform_.default"):
        function(torch.empty(draw.shape, dtype=dtype), *args)
        return
    scratch = torch.empty(min(count, 2 * _CHUNK), dtype=dtype)
    while count >= 2 * _CHUNK:
        function(scratch[:_CHUNK], *args)
        count -= _CHUNK
    function(scratch[:count], *args)


def read_weights(stage: Stage, path: Path | str, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The stage's tensors from a safetensors file; shapes and dtypes are checked before data is read.

    `names` are those to read; None: all that the stage owns.
    """
    return dict(iterate_weights(stage, path, names))


def iterate_weights(
    stage: Stage, path: Path | str, names: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """As `read_weights`, one tensor at a time."""
    return _read(path, [s for s in stage.state if s.owner == stage.index and (names is None or s.target in names)])


def _read(path: Path | str, specs: Iterable[StateSpec]) -> Iterator[tuple[str, Tensor]]:
    with open_weights(path) as file:
        for item in specs:
            dtype, shape = file.spec_of(item.target)
            if (dtype, shape) != (item.dtype, item.shape):
                raise WeightsError(
                    f"{path}: {item.target!r} is {dtype} {shape}, the stage needs {item.dtype} {item.shape}"
                )
            yield item.target, _aligned(file.read(item.target))


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, in memory of its own if its place in the mapped file is not aligned as torch aligns tensors."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


class WeightsFile:
    """An open safetensors file: names and metadata are known, tensors are read on demand."""

    def __init__(self, path: Path | str, file: Any) -> None:
        self._path, self._file = path, file
        self.names = frozenset(file.keys())
        self.metadata: dict[str, str] = file.metadata() or {}

    def spec_of(self, name: str) -> tuple[str, tuple[int, ...]]:
        """A tensor's dtype and shape; `WeightsError` if the file does not contain it."""
        if name not in self.names:
            raise WeightsError(f"{self._path} has no tensor {name!r}")
        entry = self._file.get_slice(name)
        code = entry.get_dtype()
        return _DTYPES.get(code, code), tuple(entry.get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


@contextmanager
def open_weights(path: Path | str) -> Iterator[WeightsFile]:
    """Open a safetensors file for reading; `WeightsError` if it is malformed."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield WeightsFile(path, file)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a safetensors file that can be read: {error}") from None


class WeightsWriter:
    """Writes tensors one by one, in any order, into a file whose contents are declared up front."""

    def __init__(self, file: IO[bytes], contents: Iterable[StateSpec], metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._offsets: dict[str, tuple[StateSpec, int]] = {}
        offset = 0
        for item in contents:
            header[item.target] = {
                "dtype": _CODES[item.dtype],
                "shape": list(item.shape),
                "data_offsets": [offset, offset + item.num_bytes],
            }
            self._offsets[item.target] = (item, offset)
            offset += item.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self._start = 8 + len(text)
        self._file = file
        self.missing = set(self._offsets)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(self._start + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        if name not in self._offsets:
            raise ValueError(f"tensor {name!r} was not declared for this file")
        item, offset = self._offsets[name]
        if tuple(tensor.shape) != item.shape or tensor.dtype != DTYPES[item.dtype]:
            raise WeightsError(f"{name!r} is {tuple(tensor.shape)} {tensor.dtype}, declared {item.shape} {item.dtype}")
        self._file.seek(self._start + offset)
        self._append(tensor)
        self.missing.discard(name)

    def write_parts(self, name: str, parts: Iterable[Tensor]) -> None:
        """Write a tensor whose flat elements come in parts, one after the other."""
        item, offset = self._offsets[name]
        self._file.seek(self._start + offset)
        num_written = 0
        for part in parts:
            if part.dtype != DTYPES[item.dtype]:
                raise WeightsError(f"{name!r} is {part.dtype}, declared {item.dtype}")
            self._append(part)
            num_written += part.numel()
        if num_written != prod(item.shape):
            raise WeightsError(f"{name!r} has {num_written} elements, declared {item.shape}")
        self.missing.discard(name)

    def _append(self, tensor: Tensor) -> None:
        flat = tensor.detach().to(_CPU).contiguous().reshape(-1)
        if flat.numel():
            self._file.write(flat.view(torch.uint8).numpy().data)


@contextmanager
def write_weights(
    path: Path | str, contents: Iterable[StateSpec], metadata: Mapping[str, str] | None = None
) -> Iterator[WeightsWriter]:
    """Open a weights file for writing; it appears at `path` once every declared tensor is written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w+b") as file:
            writer = WeightsWriter(file, contents, metadata or {})
            yield writer
            if writer.missing:
                raise WeightsError(
                    f"{path}: {len(writer.missing)} tensors were not written: {min(writer.missing)!r}, …"
                )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
