"""Predicts the next token with a program that was traced for training: its model's output, without the loss.

A program takes sequences of the length it was traced for. A prompt is padded on the right, and the prediction is read
at its last token, which in a causal model does not depend on what follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ravnest.graph.batch import BatchLayout, unflatten
from ravnest.graph.program import DTYPES, Program, Stage, Value, refs, resolve_dim
from ravnest.protocol.commands import MAX_CANDIDATES

__all__ = ["PromptEncoder", "best_tokens", "prediction_stage"]

_TOKENS, _MASK = "input_ids", "attention_mask"


def prediction_stage(stage: Stage) -> Stage:
    """The last stage without the ops that only the loss needs; its one output is the prediction."""
    assert stage.prediction is not None
    needed, ops = {stage.prediction.name}, []
    for op in reversed(stage.ops):
        if needed.intersection(op.outs):
            needed.update(refs(op))
            ops.append(op)
    return msgspec.structs.replace(stage, ops=tuple(reversed(ops)), outputs=(stage.prediction,), init=None)


def best_tokens(prediction: Tensor, positions: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
    """The most probable tokens at one position of each sample, best first, and their scores.

    Raises `ValueError` if the positions do not match the prediction.
    """
    samples, length = prediction.shape[:2]
    if len(positions) != samples or not all(0 <= position < length for position in positions):
        raise ValueError(f"{len(positions)} positions do not match {samples} samples of length {length}")
    device = prediction.device
    rows = prediction[torch.arange(samples, device=device), torch.tensor(positions, device=device)].float()
    scores, tokens = rows.topk(min(MAX_CANDIDATES, rows.shape[1]), dim=1)
    return tokens.tolist(), scores.tolist()


class PromptEncoder:
    """Makes the inputs of a program for a prompt of token ids; raises `ValueError` for a program that has no tokens."""

    def __init__(self, program: Program) -> None:
        if program.prediction is None:
            raise ValueError(
                "this model cannot generate: its output must be a score for every token at every position, as a "
                "tensor or as `.logits`, with three dimensions"
            )
        self._values = program.feed.values
        self._kinds = _kinds(program.feed)
        tokens = self._values[self._kinds.index(_TOKENS)]
        self._length = resolve_dim(tokens.shape[1], 1)
        self.vocabulary = resolve_dim(program.prediction.shape[2], 1)

    @property
    def length(self) -> int:
        """The most tokens that a prompt can have; earlier ones are cut off."""
        return self._length

    def __call__(self, tokens: Sequence[int]) -> tuple[list[Tensor], int]:
        """The inputs of one sample, and the position of the prediction in it."""
        if not tokens:
            raise ValueError("a prompt needs at least one token")
        if wrong := [token for token in tokens if not 0 <= token < self.vocabulary]:
            raise ValueError(f"token {wrong[0]} is not in the model's vocabulary of {self.vocabulary}")
        tokens = tokens[-self._length :]
        made = [self._input(kind, value, tokens) for kind, value in zip(self._kinds, self._values, strict=True)]
        return made, len(tokens) - 1

    def _input(self, kind: str, value: Value, tokens: Sequence[int]) -> Tensor:
        tensor = torch.zeros([resolve_dim(d, 1) for d in value.shape], dtype=DTYPES[value.dtype])
        if kind == _TOKENS:
            tensor[0, : len(tokens)] = torch.tensor(tokens)
        elif kind == _MASK:
            tensor[0, : len(tokens)] = 1
        return tensor


def _kinds(layout: BatchLayout) -> list[str]:
    """For each input of the program: token ids, an attention mask, or something that the prediction does not need."""
    inputs: Any = unflatten(layout.structure, range(len(layout.values)))["inputs"]  # type: ignore[arg-type]
    if isinstance(inputs, list | tuple) and len(inputs) == 1:
        inputs = inputs[0]
    named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {_TOKENS: inputs}
    kinds = [""] * len(layout.values)
    for name, index in named.items():
        if isinstance(index, int) and not isinstance(index, bool) and name in (_TOKENS, _MASK):
            kinds[index] = name
        elif name not in ("labels", "targets"):
            raise ValueError(f"this model cannot generate: it takes {name!r} besides token ids and an attention mask")
    tokens = [layout.values[i] for i, kind in enumerate(kinds) if kind == _TOKENS]
    if len(tokens) != 1 or tokens[0].dtype not in ("int64", "int32") or len(tokens[0].shape) != 2:
        raise ValueError("this model cannot generate: its input must be token ids, two-dimensional and of integers")
    return kinds
