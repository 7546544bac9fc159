"""Converts checkpoints whose names or layout are not those of the model, as `from_pretrained` does.

`transformers` knows for its models how checkpoints differ: other names, and weights that the model has as one tensor
and the files have in parts, such as those of experts. `save_pretrained` writes these forms too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ravnest.errors import WeightsError
from ravnest.graph.pretrained_folder import MergedTensor, PretrainedFolder, StoredTensor, listed

__all__ = ["converted"]


def converted(folder: PretrainedFolder, module: nn.Module) -> PretrainedFolder:
    """Return the folder with the names and tensors of the model that is or is in `module`.

    Raises:
        WeightsError: if a tensor needs a conversion other than stacking and concatenating.
    """
    root = next((part for part in module.modules() if hasattr(type(part), "base_model_prefix")), None)
    transforms = [] if root is None else _transforms(root)
    if not transforms:
        return folder
    from transformers.core_model_loading import WeightConverter, rename_source_key

    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors: dict[str, StoredTensor | MergedTensor] = {}
    parts: dict[tuple[str, Any], dict[str, list[str]]] = {}
    for name in sorted(folder.tensors, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters)
        if pattern is None:
            tensors[target] = folder.tensors[name]
        else:
            parts.setdefault((target, by_pattern[pattern]), {}).setdefault(pattern, []).append(name)
    for (target, converter), names in parts.items():
        tensors[target] = _merged(folder, target, converter, names)
    return replace(folder, tensors=tensors)


def _transforms(root: nn.Module) -> Sequence[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # a version of transformers without conversions
        return ()
    return get_model_conversion_mapping(root, add_legacy=False)  # type: ignore[no-any-return]


def _merged(folder: PretrainedFolder, target: str, converter: Any, names: Mapping[str, Sequence[str]]) -> MergedTensor:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    dims = {type(operation): operation.dim for operation in converter.operations if hasattr(operation, "dim")}
    rows = [_stored(folder, names.get(pattern, ())) for pattern in converter.source_patterns]
    kinds = [type(operation) for operation in converter.operations]
    is_known = kinds in ([MergeModulelist], [Concatenate], [MergeModulelist, Concatenate])
    if not is_known or len(converter.target_patterns) != 1:
        first = next(name for held in names.values() for name in held)
        raise WeightsError(
            f"{folder.folder}: {first} must be converted by {', '.join(kind.__name__ for kind in kinds)} to become "
            f"{target}, which is not supported: load the checkpoint with from_pretrained and pass the model itself"
        )
    if any(not row for row in rows) or len({len(row) for row in rows}) > 1:
        raise WeightsError(
            f"{folder.folder} lacks parts of {target}: it has {listed([n for held in names.values() for n in held])}"
        )
    if any(len({(part.dtype, part.shape) for part in row}) > 1 for row in rows):
        raise WeightsError(f"{folder.folder} has parts of {target} that differ in shape or dtype")
    return MergedTensor(tuple(rows), dims.get(MergeModulelist), dims.get(Concatenate))


def _stored(folder: PretrainedFolder, names: Sequence[str]) -> tuple[StoredTensor, ...]:
    found = (folder.tensors[name] for name in names)
    return tuple(tensor for tensor in found if isinstance(tensor, StoredTensor))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts expert 10 after expert 9."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name)]
