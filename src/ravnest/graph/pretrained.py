"""Models whose weights come from a folder of safetensors files, as `save_pretrained` writes them.

The builder gives the architecture, under fake tensors; the files are matched with its parameters by name, shape and
dtype before anything starts, and are read one tensor at a time. Names may differ as they do in practice:

    transformer.h.0.w        h.0.w                          the base prefix of a transformers model is there or not
    model.layers.0.w         lm.model.layers.0.w            the transformers model is a part of another module
    q_proj.weight            base_model.model.q_proj.base_layer.weight      an adapter of peft wraps it
    lm_head.weight           transformer.wte.weight         tied parameters are stored once, under either name

Other layouts of older checkpoints are converted as transformers converts them (`checkpoint_conversion`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ravnest.core.config import require
from ravnest.errors import WeightsError
from ravnest.graph.checkpoint_conversion import converted
from ravnest.graph.pretrained_folder import PretrainedFolder, listed
from ravnest.graph.program import DTYPES, StateSpec

__all__ = ["Pretrained", "PretrainedWeights", "match_weights", "pretrained"]

_CHUNK = 1 << 22  # elements that are checked at a time


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
                    raise WeightsError(
                        f"{self.folder.tensors[source].place}: {source} has values that are not finite in "
                        f"{parameters[source].dtype}: choose another checkpoint, or another dtype"
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
    folder = converted(PretrainedFolder.open(model.folder), module)
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
            f"{model.folder} has no tensor of this model: it has {listed(sorted(folder.tensors))}, "
            f"the model has {listed(sorted(state))}"
        )
    _check_specs(folder, {state[target]: source for target, source in sources.items()})
    absent = [s.target for s in state.values() if s.kind == "parameter" and s.target not in sources]
    lacking = [name for name in absent if not names.is_adapter(name)]
    if lacking and model.missing == "error":
        raise WeightsError(
            f"{model.folder} lacks {listed(lacking)}: give missing='initialise' to let the builder initialise them"
        )
    notes = [f"initialised, because {model.folder} lacks them: {listed(lacking)}"] if lacking else []
    used = {source for at in found.values() for source in at} | set(names.ignored(state, folder.tensors.keys()))
    if extra := sorted(folder.tensors.keys() - used):
        notes.append(f"{model.folder} has tensors that the model does not have: {listed(extra)}")
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
