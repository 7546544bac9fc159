"""Makes the configuration of a `transformers` architecture small.

A number is shrunk by its role, which its name tells: layers, heads, widths, experts, positions. Lists with an entry per
layer keep an entry of each kind. There are several ways to choose sizes that fit together; a caller takes the first for
which plain PyTorch trains a step.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["VOCABULARY", "small_configs"]

VOCABULARY = 99
_ROLES: tuple[tuple[str, str], ...] = (  # the first pattern that matches a name gives its role
    (r"dropout|_prob|epsilon|kernel|stride|dilation|num_labels|type_vocab|in_channels|num_channels|norm", ""),
    (r"_offset$", "offset"),
    (r"_period$|every_n|_step$", "period"),
    (r"vocab|num_embeddings", "vocabulary"),
    (r"(max|n|num).*(position|ctx|seq_?len|length|source|target)|seq_length|max_len", "positions"),
    (r"(key_value|kv).*heads?|n_head_kv|query_groups", "kv_heads"),
    (r"heads?$|n_head|heads_", "heads"),
    (r"head_(dim|size|width)|d_kv|d_head|head_hidden|dim_head|rotary_dim|d_rel", "head_dim"),
    (r"rank$", "rank"),
    (r"(^|_)(layers?|depth|blocks)($|_)|n_layers?$|^layers?$", "layers"),
    (r"topk_group|n_group$|expert_group|n_groups|num_groups", "groups"),
    (r"experts?_per|per_tok|top_?k|moe_k", "chosen"),
    (r"experts?($|_)|n_routed|num_local", "experts"),
    (r"window|chunk|block_size|sparse_block", "window"),
    (r"image_size|img_size|input_size$|crop_size", "image"),
    (r"patch_size|tubelet", "patch"),
    (r"num_frames", "frames"),
    (r"num_mel|feature_size|num_bins|mel_bins", "features"),
    (r"state_size|d_state|ssm_state", "state"),
    (r"num_(queries|latents|query_tokens)|query_length", "queries"),
    (r"intermediate|ffn|d_ff|inner|mlp_(dim|hidden)|ff_dim|linear_size|n_ff", "inner"),
    (r"hidden|d_model|embd|embed|width|_dim$|^dim$|_size$|channels$|d_latents|units", "width"),
)  # fmt: skip
_SIZES = {
    "offset": 1, "period": 2, "vocabulary": VOCABULARY, "positions": 64, "kv_heads": 2, "heads": 4, "head_dim": 8,
    "rank": 16, "layers": 2, "groups": 2, "chosen": 2, "experts": 4, "window": 8, "image": 32, "patch": 8, "frames": 4,
    "features": 16, "state": 8, "queries": 8, "inner": 64, "width": 32,
}  # fmt: skip
_DERIVED = ("transformers_version", "_name_or_path", "stage_names", "out_features", "out_indices")
_FILLED = ("chosen", "experts", "kv_heads", "heads", "head_dim", "rank", "inner", "width")
_ID = re.compile(r"_(token_)?(id|index)$|_token$|token_idx")


@dataclass(frozen=True)
class _Way:
    """How sizes are chosen: `changed` ones differ from `_SIZES`, `divisors` divide a role's numbers instead."""

    changed: tuple[tuple[str, int], ...] = ()
    divisors: tuple[tuple[str, int], ...] = ()
    only: tuple[str, ...] = ()  # roles that shrink, if not all
    fills: bool = False  # numbers that the default configuration leaves open

    def size(self, name: str, value: int) -> int:
        role = _role(name)
        if not role or (self.only and role not in self.only):
            return value
        if (divisor := dict(self.divisors).get(role)) is not None:
            return max(1, value // divisor)
        return min(value, self.limit(role))

    def limit(self, role: str) -> int:
        return dict(self.changed).get(role, _SIZES[role])


_WAYS = (
    _Way(),
    _Way((("kv_heads", 4), ("groups", 1))),
    _Way((("head_dim", 16), ("groups", 1))),
    _Way(divisors=tuple({"heads": 4, "kv_heads": 4, "head_dim": 16, "rank": 16, "inner": 16, "width": 16}.items())),
)  # fmt: skip
_DEEPER = 6  # layers, for architectures whose kinds of layers alternate
_UNCHANGED_WIDTHS = _Way(only=("layers", "vocabulary", "image", "positions"))


def small_configs(config: Any) -> Iterator[Any]:
    """Small configurations like `config`, from the smallest; exceptions are those of the configuration class."""
    for deeper, fills, way in itertools.product((False, True), (False, True), _WAYS):
        changed = (*way.changed, ("layers", _DEEPER), ("period", 3)) if deeper else way.changed
        yield from _rebuilt(config, _Way(changed, way.divisors, fills=fills))
    yield from _rebuilt(config, _UNCHANGED_WIDTHS)


def _rebuilt(config: Any, way: _Way) -> Iterator[Any]:
    entries = {k: v for k, v in config.to_dict().items() if k not in _DERIVED}
    if entries.get("is_encoder_decoder") and entries.get("decoder_start_token_id") is None:
        entries["decoder_start_token_id"] = 0
    try:
        yield type(config)(**_shrunk(entries, way))
    except Exception:  # a configuration rejects sizes that do not fit together in many ways: try the next
        return


def _role(name: str) -> str:
    return next((role for pattern, role in _ROLES if re.search(pattern, name)), "")


def _shrunk(entries: dict[str, Any], way: _Way) -> dict[str, Any]:
    """The entries of a configuration with small numbers, nested configurations included."""
    depths = {v for k, v in entries.items() if type(v) is int and _role(k) == "layers"}
    result: dict[str, Any] = {}
    used: set[int] = set()
    for name, value in entries.items():
        if name in _DERIVED:
            continue
        if isinstance(value, dict) and value and "label" not in name and all(str(key).isdigit() for key in value):
            kept = {k: v for k, v in value.items() if int(k) < way.limit("layers")}
            result[name] = {k: _shrunk(v, way) if isinstance(v, dict) else v for k, v in kept.items()}
        elif isinstance(value, dict) and (name.endswith("config") or "model_type" in value):
            result[name] = _shrunk(value, way)
        elif _ID.search(name) and type(value) is int and value >= 0:
            result[name] = _identifier(value, used)
        elif type(value) is int:
            result[name] = way.size(name, value)
        elif value is None and way.fills and name == "pad_token_id":
            result[name] = 0
        elif value is None and way.fills and _role(name) in _FILLED:
            result[name] = way.limit(_role(name))
        elif isinstance(value, list) and value:
            result[name] = _shrunk_list(name, value, depths, way)
        else:
            result[name] = copy.deepcopy(value)
    return result


def _identifier(value: int, used: set[int]) -> int:
    """A token of the small vocabulary; different tokens stay different."""
    if value >= VOCABULARY:
        value = next(i for i in range(VOCABULARY - 1, 0, -1) if i not in used)
    used.add(value)
    return value


def _shrunk_list(name: str, value: list[Any], depths: set[int], way: _Way) -> list[Any]:
    if len(value) in depths:
        value = _of_each_kind(value, way.limit("layers"))
    if all(type(v) is int for v in value):
        return [min(v, 1) for v in value] if _role(name) == "layers" else [way.size(name, v) for v in value]
    return copy.deepcopy(value)


def _of_each_kind(items: list[Any], count: int) -> list[Any]:
    """`count` of the items in their order, with one of each kind if there are not more kinds."""
    if len(items) <= count:
        return items
    firsts = [i for i, item in enumerate(items) if item not in items[:i]][-count:]
    others = [i for i in range(len(items)) if i not in firsts]
    return [items[i] for i in sorted([*firsts, *others[: count - len(firsts)]])]
