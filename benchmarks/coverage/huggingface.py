"""Architectures of `transformers`, each with its default configuration made small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.coverage.case import Case

__all__ = ["causal_cases"]

_SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 99, "max_position_embeddings": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "n_ctx": 64, "n_inner": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2,
    "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_dim": 64, "embedding_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "word_embed_proj_dim": 32, "state_size": 8, "expand": 2, "n_groups": 1,
    "rotary_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
    "attention_hidden_size": 32, "num_decoder_layers": 2, "num_encoder_layers": 2, "decoder_start_token_id": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "ffn_hidden_size": 64, "hidden_dim": 64,
    "sliding_window": 8,
}  # fmt: skip
_SAMPLES, _LENGTH = 3, 12


def tiny(config: Any) -> Any:
    """The configuration with small sizes, nested ones included."""
    for name, value in _SMALL.items():
        if isinstance(getattr(config, name, None), int | float) and not isinstance(getattr(config, name), bool):
            setattr(config, name, value)
    for name, part in list(vars(config).items()):
        if name.endswith("_config") and hasattr(part, "to_dict"):
            tiny(part)
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    return config


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 99, (_SAMPLES, _LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def causal_cases() -> Iterator[Case]:
    """Every causal language model of the auto classes; those whose configuration cannot be made small are `broken`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:

        def build(kind: str = kind) -> nn.Module:
            model: nn.Module = AutoModelForCausalLM.from_config(tiny(AutoConfig.for_model(kind)))
            return model

        yield Case(kind, "causal", build, None, _batch)
