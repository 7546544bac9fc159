"""Exports models with an adapter of `peft`: the adapter alone, or merged into the weights, one layer at a time.

The model has no memory for its weights; tensors are assigned to a layer while it is merged, and removed afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ravnest.core.config import require
from ravnest.errors import RavnestError
from ravnest.graph.program import storage_id

__all__ = ["AdapterModel", "is_adapter_model"]

Read = Callable[[str], Tensor]


def is_adapter_model(model: nn.Module) -> bool:
    """Return whether a model is a `PeftModel`."""
    return type(model).__module__.startswith("peft.") and hasattr(model, "peft_config")


class AdapterModel:
    """A `PeftModel` with one adapter. `folder` is the directory that its base model was loaded from, if known."""

    def __init__(self, model: Any, folder: str) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper

        require(
            len(model.peft_config) == 1,
            f"the model has {len(model.peft_config)} adapters, export supports one: remove the others with "
            "model.delete_adapter",
        )
        self._model, self._folder = model, folder
        self._adapter = next(iter(model.peft_config))
        self._config = model.peft_config[self._adapter]
        self.base: nn.Module = model.get_base_model()
        self.is_untied = False  # merging separated tied embeddings
        self._names = tuple(model.state_dict())
        parts = dict(model.named_modules())
        self._layers: dict[str, Any] = {path: part for path, part in parts.items() if isinstance(part, BaseTunerLayer)}
        self._copied = tuple(path for path, part in parts.items() if isinstance(part, ModulesToSaveWrapper))
        own = [f"{path}.{name}." for path, layer in self._layers.items() for name in layer.adapter_layer_names]
        self._prefixes = ("prompt_encoder.", *own)

    # the adapter alone

    def adapter_tensors(self, read: Read) -> dict[str, Tensor]:
        """The tensors of the adapter under the names that `PeftModel.from_pretrained` reads."""
        from peft import get_peft_model_state_dict

        model, config = self._model, self._config
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        own = {name for name in self._names if name in trained or name.startswith(self._prefixes)}
        model.load_state_dict({name: read(name) for name in sorted(own)}, strict=False, assign=True)
        if config.is_prompt_learning:
            count = config.num_virtual_tokens * config.num_transformer_submodules
            model.prompt_tokens[self._adapter] = torch.arange(count)
        tensors: dict[str, Tensor] = get_peft_model_state_dict(
            model, adapter_name=self._adapter, save_embedding_layers=False
        )
        kept = {storage_id(tensor) for tensor in tensors.values()}
        for name, parameter in model.named_parameters():
            is_kept = storage_id(parameter) in kept or name.startswith("prompt_encoder.")
            if name in trained and not is_kept:
                raise RavnestError(
                    f"{name} was trained and is not part of the adapter: export the whole model with --merge"
                )
        if unknown := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise RavnestError(f"the adapter needs {unknown[0]}, which is not trained: export with --merge")
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}

    def save_adapter_config(self, folder: Path) -> None:
        """Write `adapter_config.json`; it names the base model."""
        config = copy.copy(self._config)
        config.inference_mode = True
        if not config.base_model_name_or_path and self._folder:
            config.base_model_name_or_path = self._folder
        config.save_pretrained(str(folder))

    # merged

    def merged_names(self, ties: Mapping[str, str]) -> dict[str, str]:
        """Map the tensors of the merged model to their names in it; raises `RavnestError` if it cannot be merged."""
        if self._config.is_prompt_learning:
            raise RavnestError(
                f"an adapter of type {self._config.peft_type.value} cannot be merged: export without --merge"
            )
        separated = {name for tie in ties.items() for name in tie if self._is_separated(*tie)}
        merged: dict[str, str] = {}
        for name in self._names:
            plain = self._merged_name(name)
            if plain is not None and (name not in ties or name in separated):
                merged[name] = plain
        return merged

    def _is_separated(self, other: str, kept: str) -> bool:
        """Whether tied tensors differ after merging, because only one of them has an adapter or a trained copy."""
        changed = [
            path for path in (*self._layers, *self._copied) if any(n.startswith(f"{path}.") for n in (other, kept))
        ]
        if not changed or any(other.startswith(f"{path}.") and kept.startswith(f"{path}.") for path in changed):
            return False
        base: Any = self.base
        embeddings = (base.get_input_embeddings(), base.get_output_embeddings())
        owners = [self._module_of(name) for name in (other, kept)]
        if not all(any(owner is part for part in embeddings) for owner in owners):
            raise RavnestError(f"{other} is tied to {kept} and cannot be merged alone: export without --merge")
        self.is_untied = True
        return True

    def _module_of(self, name: str) -> nn.Module:
        """The module of the base model that has a tensor, in its wrapper."""
        path = next((path for path in (*self._layers, *self._copied) if name.startswith(f"{path}.")), None)
        module: nn.Module = self._model.get_submodule(path or name.rpartition(".")[0])
        return module

    def _merged_name(self, name: str) -> str | None:
        """The name in the merged model; None for a tensor that is merged or replaced."""
        if name.startswith(self._prefixes):
            return None
        own = name.removeprefix("base_model.model.")
        for path in self._copied:
            if name.startswith(f"{path}.original_module."):
                return None
            own = own.replace(f".modules_to_save.{self._adapter}.", ".")
        return own.replace(".base_layer.", ".")

    def merged_tensors(self, names: Mapping[str, str], read: Read) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the merged model; the adapter is merged layer by layer, in copies, as peft does it."""
        left = dict(names)
        for path, layer in self._layers.items():
            start = f"{path}."
            own = {name: left.pop(name) for name in [n for n in left if n.startswith(start)]}
            state = {name.removeprefix(start): read(name).clone() for name in self._names if name.startswith(start)}
            layer.load_state_dict(state, strict=False, assign=True)
            with torch.no_grad():
                layer.merge(adapter_names=[self._adapter])
            tensors = layer.state_dict()
            yield from ((to, tensors[name.removeprefix(start)]) for name, to in own.items())
            layer.to("meta")
        yield from ((to, read(name)) for name, to in left.items())
