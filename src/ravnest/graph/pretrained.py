"""Models whose weights come from a folder of safetensors files, as `save_pretrained` writes them.

The builder gives the architecture, under fake tensors; the files are matched with its parameters by name, shape and
dtype before anything starts, and are read one tensor at a time. Names may differ as they do in practice:

    transformer.h.0.w        h.0.w                          the base prefix of a transformers model is there or not
    model.layers.0.w         lm.model.layers.0.w            the transformers model is a part of another module
    q_proj.weight            base_model.model.q_proj.base_layer.weight      an adapter of peft wraps it
    lm_head.weight           transformer.wte.weight         tied parameters are stored once, under either name
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ravnest.core.config import require
from ravnest.errors import WeightsError
from ravnest.graph.program import DTYPES, StateSpec
from ravnest.graph.weights import WeightsFile, open_weights

__all__ = ["Pretrained", "PretrainedWeights", "match_weights", "pretrained"]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_CHUNK = 1 << 22  # elements that are checked at a time
_NAMED = 3  # names listed in a message


@dataclass(frozen=True)
class Pretrained:
    """A model argument of a job; see `pretrained`."""

    folder: Path
    builder: Callable[[], nn.Module]
    missing: Literal["error", "initialise"] = "error"


def pretrained(
    folder: Path | str, builder: Callable[[], nn.Module], *, missing: Literal["error", "initialise"] = "error"
) -> Pretrained:
    """Start from the weights in a folder, without a process that holds all of them.

    Each node fetches the tensors of its own stage only. They are converted to the dtypes that the builder gives its
    parameters, as `from_pretrained(folder, dtype=...)` does.

    Args:
        folder: A directory with `model.safetensors`, or with `model.safetensors.index.json` and its shards.
        builder: A function that builds the architecture, such as
            `lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))`. It may add adapters with
            `peft.get_peft_model`, whose new parameters are initialised as after `from_pretrained`.
        missing: What to do with parameters that the folder lacks, such as those of a new head: "error", or
            "initialise" to let the builder initialise them. Buffers always keep the builder's values.

    Returns:
        A value for `Job(model=...)`.

    Raises:
        ValueError: An argument is wrong.
    """
    require(callable(builder), f"builder must be a function that builds the model, got a {type(builder).__name__}")
    require(
        not isinstance(builder, nn.Module),
        "builder must be a function that builds the model, got a model: pass a model to Job(model=...) itself",
    )
    require(missing in ("error", "initialise"), f"missing must be 'error' or 'initialise', got {missing!r}")
    return Pretrained(Path(folder), builder, missing)


@dataclass(frozen=True)
class _StoredTensor:
    path: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PretrainedFolder:
    """The tensors of a folder: their files, dtypes and shapes are known, and nothing else is read yet."""

    folder: Path
    tensors: Mapping[str, _StoredTensor]

    @staticmethod
    def open(folder: Path) -> PretrainedFolder:
        """Read the headers of all files; raises `WeightsError` if one is missing, cut off or malformed."""
        if not folder.is_dir():
            raise WeightsError(f"{folder} is not a directory: give one with {_SINGLE} or {_INDEX}")
        tensors: dict[str, _StoredTensor] = {}
        for path, names in _files_of(folder).items():
            with open_weights(path) as file:
                if absent := sorted(set(names or ()) - file.names):
                    raise WeightsError(f"{path} lacks {_listed(absent)}, which {_INDEX} says it has")
                for name in names or file.names:
                    tensors[name] = _StoredTensor(path, *file.spec_of(name))
        return PretrainedFolder(folder, tensors)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one at a time, file by file."""
        by_path: dict[Path, list[str]] = {}
        for name in names:
            by_path.setdefault(self.tensors[name].path, []).append(name)
        for path, held in by_path.items():
            with open_weights(path) as file:
                for name in held:
                    yield name, _checked(file, path, name, self.tensors[name]).read(name)


def _checked(file: WeightsFile, path: Path, name: str, stored: _StoredTensor) -> WeightsFile:
    """The file, unless it was replaced since its header was read."""
    if file.spec_of(name) != (stored.dtype, stored.shape):
        raise WeightsError(f"{path} has changed since the job started: {name} is another tensor now")
    return file


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


@dataclass(frozen=True)
class PretrainedWeights:
    """The tensors of a folder that a program starts from; `sources` maps names in the model to those in the files.

    `initialised` are the parameters that the builder initialises. `notes` are messages for the user.
    """

    folder: PretrainedFolder
    sources: Mapping[str, str]
    initialised: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    duplicates: Mapping[str, Sequence[str]] = field(default_factory=dict)  # other names of a source

    def read(self, specs: Iterable[StateSpec]) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one at a time, in the dtypes of the model."""
        wanted: dict[str, list[StateSpec]] = {}
        for item in specs:
            wanted.setdefault(self.sources[item.target], []).append(item)
        for source, tensor in self.folder.read(wanted):
            for item in wanted[source]:
                yield item.target, tensor.to(DTYPES[item.dtype])

    def check_values(self, specs: Iterable[StateSpec]) -> None:
        """Read all parameters once; raises `WeightsError` for one that is not finite or has two values."""
        parameters = {self.sources[s.target]: s for s in specs if s.kind == "parameter" and s.target in self.sources}
        for source, tensor in self.folder.read(parameters):
            flat = tensor.reshape(-1)
            if not flat.is_floating_point():
                continue
            for start in range(0, flat.numel(), _CHUNK):
                part = flat[start : start + _CHUNK].to(DTYPES[parameters[source].dtype])
                if not torch.isfinite(part).all():
                    path = self.folder.tensors[source].path
                    raise WeightsError(
                        f"{path}: {source} has values that are not finite in {parameters[source].dtype}: "
                        "choose another checkpoint, or another dtype"
                    )
            for other, same in self.folder.read(self.duplicates.get(source, ())):
                if not torch.equal(tensor, same):
                    raise WeightsError(
                        f"{self.folder.folder} has different values for {source} and {other}, which the model ties: "
                        "build it with tie_word_embeddings=False, or choose another checkpoint"
                    )


# matching


def match_weights(
    model: Pretrained, module: nn.Module, specs: Sequence[StateSpec], ties: Mapping[str, str]
) -> PretrainedWeights:
    """Match the tensors of a folder with those of the model that the builder made.

    Raises:
        WeightsError: A file cannot be used, a parameter is missing or misshapen, or nothing matches.
    """
    folder = PretrainedFolder.open(model.folder)
    names = _Names(module)
    state = {s.target: s for s in specs if not s.target.startswith(("loss.", "constant."))}
    groups: dict[str, list[str]] = {name: [name] for name in state}
    for other, kept in ties.items():
        if kept in groups:
            groups[kept].append(other)
    stored = {target: group for target, group in groups.items() if _is_stored(state[target])}
    found = names.find(stored, folder.tensors.keys())
    sources = {target: at[0] for target, at in found.items() if at}
    if not any(state[target].kind == "parameter" for target in sources):
        raise WeightsError(
            f"{model.folder} has no tensor of this model: it has {_listed(sorted(folder.tensors))}, "
            f"the model has {_listed(sorted(state))}"
        )
    _check_specs(folder, {state[target]: source for target, source in sources.items()})
    absent = [s.target for s in state.values() if s.kind == "parameter" and s.target not in sources]
    lacking = [name for name in absent if not names.is_adapter(name)]
    if lacking and model.missing == "error":
        raise WeightsError(
            f"{model.folder} lacks {_listed(lacking)}: give missing='initialise' to let the builder initialise them"
        )
    notes = [f"initialised, because {model.folder} lacks them: {_listed(lacking)}"] if lacking else []
    used = {source for at in found.values() for source in at} | set(names.ignored(state, folder.tensors.keys()))
    if extra := sorted(folder.tensors.keys() - used):
        notes.append(f"{model.folder} has tensors that the model does not have: {_listed(extra)}")
    duplicates = {at[0]: at[1:] for target, at in found.items() if target in sources and len(at) > 1}
    return PretrainedWeights(folder, sources, tuple(absent), tuple(notes), duplicates)


def _is_stored(item: StateSpec) -> bool:
    return item.persistent or item.kind == "parameter"


def _check_specs(folder: PretrainedFolder, sources: Mapping[StateSpec, str]) -> None:
    wrong = []
    for item, source in sources.items():
        stored = folder.tensors[source]
        if stored.shape != item.shape:
            wrong.append(f"{source} has shape {list(stored.shape)}, the model needs {list(item.shape)}")
        elif not _is_convertible(stored.dtype, item.dtype):
            wrong.append(f"{source} is {stored.dtype}, the model needs {item.dtype}")
    if wrong:
        more = f", and {len(wrong) - 1} more do not match" if len(wrong) > 1 else ""
        raise WeightsError(f"{folder.folder} does not fit the model: {wrong[0]}{more}")


def _is_convertible(stored: str, wanted: str) -> bool:
    if stored == wanted:
        return True
    return stored in DTYPES and DTYPES[stored].is_floating_point and DTYPES[wanted].is_floating_point


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


class _Names:
    """The names under which files may store the tensors of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._roots: list[tuple[str, str]] = []  # transformers models: path, and the prefix of their base model
        self._adapters: list[str] = []  # prefixes of names that belong to adapters
        for path, part in module.named_modules():
            start = f"{path}." if path else ""
            prefix = getattr(type(part), "base_model_prefix", None)
            if isinstance(prefix, str) and not any(start.startswith(root) for root, _ in self._roots):
                self._roots.append((start, prefix))
            layers = getattr(type(part), "adapter_layer_names", None)
            if isinstance(layers, tuple):
                self._adapters += [f"{start}{layer}" for layer in layers]
            if hasattr(type(part), "get_prompt_embedding_to_save"):
                self._adapters.append(f"{start}prompt_encoder")

    def is_adapter(self, name: str) -> bool:
        """Whether a parameter belongs to an adapter, which is always new."""
        return any(name == prefix or name.startswith(f"{prefix}.") for prefix in self._adapters)

    def find(self, groups: Mapping[str, Sequence[str]], stored: Collection[str]) -> dict[str, list[str]]:
        """The stored names of each tensor, the best first; `groups` has all names that the module has for it.

        A name that needs a prefix is not used where another tensor has exactly that name.
        """
        exact = {target: self._stored_as(group, stored, self._own_names) for target, group in groups.items()}
        taken = {name for names in exact.values() for name in names}
        free = set(stored) - taken
        return {
            target: names or self._stored_as(groups[target], free, self._prefixed_names)
            for target, names in exact.items()
        }

    def ignored(self, state: Mapping[str, StateSpec], stored: Collection[str]) -> Iterator[str]:
        """Stored names of buffers that the model computes itself."""
        for item in state.values():
            if not _is_stored(item):
                yield from (
                    name
                    for name in (*self._own_names(item.target), *self._prefixed_names(item.target))
                    if name in stored
                )

    def _stored_as(
        self, group: Sequence[str], stored: Collection[str], names_of: Callable[[str], Iterable[str]]
    ) -> list[str]:
        own = [name for name in group if not self.is_adapter(name)]
        return list(dict.fromkeys(name for known in own for name in names_of(known) if name in stored))

    def _own_names(self, name: str) -> Iterator[str]:
        yield name
        yield _plain(name)
        yield from (_plain(name.removeprefix(root)) for root, _ in self._roots if name.startswith(root))

    def _prefixed_names(self, name: str) -> Iterator[str]:
        """The name with the prefix of a base model, or without it."""
        for root, prefix in self._roots:
            if prefix and name.startswith(root):
                own = _plain(name.removeprefix(root))
                yield own.removeprefix(f"{prefix}.") if own.startswith(f"{prefix}.") else f"{prefix}.{own}"


def _plain(name: str) -> str:
    """The name without the parts that wrappers of peft add to it."""
    parts = name.split(".")
    kept = []
    skip = False
    for part in parts:
        if skip:  # the name of the adapter
            skip = False
        elif part == "modules_to_save":
            skip = True
        elif part not in ("base_layer", "original_module"):
            kept.append(part)
    return ".".join(kept)
