"""Configurations of language models are made small by the roles of their numbers."""

from __future__ import annotations

from typing import Any

from benchmarks.coverage.shrink import VOCABULARY, small_configs


class Config:
    """A configuration that rejects sizes which do not fit together, as those of transformers do."""

    def __init__(self, **entries: Any) -> None:
        if entries["hidden_size"] * 2 != entries["num_heads"] * entries["head_dim"]:
            raise ValueError("the heads do not fit")
        self.entries = entries

    def to_dict(self) -> dict[str, Any]:
        return self.entries


DEFAULT = Config(
    hidden_size=1024, num_heads=32, head_dim=64, num_hidden_layers=24, vocab_size=50_000, eos_token_id=49_999,
    bos_token_id=49_998, pad_token_id=3, layer_types=["mamba"] * 22 + ["attention", "mamba"], hidden_dropout_prob=0.1,
    text_config={"intermediate_size": 4096, "num_layers": 12},
)  # fmt: skip


def test_numbers_shrink_by_their_roles_and_fit_together() -> None:
    small = next(small_configs(DEFAULT)).entries
    assert small["hidden_size"] * 2 == small["num_heads"] * small["head_dim"]
    assert small["num_hidden_layers"] == 2
    assert small["vocab_size"] == VOCABULARY
    assert small["text_config"] == {"intermediate_size": 64, "num_layers": 2}
    assert small["hidden_dropout_prob"] == 0.1


def test_a_list_per_layer_keeps_every_kind() -> None:
    small = next(small_configs(DEFAULT)).entries
    assert small["layer_types"] == ["mamba", "attention"]


def test_different_tokens_stay_different() -> None:
    small = next(small_configs(DEFAULT)).entries
    tokens = [small[f"{name}_token_id"] for name in ("eos", "bos", "pad")]
    assert len(set(tokens)) == 3
    assert all(token < VOCABULARY for token in tokens)
    assert small["pad_token_id"] == 3
