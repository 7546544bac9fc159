"""Predictions with a program traced for training equal those of the model itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ravnest.errors import ProgramError
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.graph import Interpreter, Program, Stage, dump, legal_cuts, load, split, stage_weights, trace
from ravnest.graph.prediction import PromptEncoder, best_tokens, prediction_stage
from tests.sampling import every

VOCAB, LENGTH = 40, 12
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=VOCAB, context=LENGTH, layers=2, width=16, heads=2, dropout=0.1, tied=True))


MODELS: dict[str, Any] = {
    "gpt": gpt,
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=VOCAB, n_positions=LENGTH, bos_token_id=0, eos_token_id=0)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}


def ids(samples: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCAB, (samples, length), generator=torch.Generator().manual_seed(0))


def traced(name: str, model: nn.Module, form: str) -> Program:
    if name == "gpt":
        return trace(model, next_token_loss, (ids(), ids()))
    if form == "labels":
        return trace(model, None, {"input_ids": ids(), "attention_mask": torch.ones_like(ids()), "labels": ids()})
    return trace(model, lambda output, targets: next_token_loss(output.logits, targets), (ids(), ids()))


def predicted(program: Program, stages: list[Stage], tokens: list[int]) -> tuple[list[int], list[float]]:
    """Through the stages, each loaded from its wire form."""
    values, position = PromptEncoder(program)(tokens)
    loaded = [load(dump(stage)) for stage in stages]
    weights = {name: tensor for stage in loaded for name, tensor in stage_weights(program, stage).items()}
    with torch.no_grad():
        for stage in loaded[:-1]:
            values = list(Interpreter(stage)(weights, values, training=False))
        (prediction,) = Interpreter(prediction_stage(loaded[-1]))(weights, values, training=False)
    best, scores = best_tokens(prediction, [position])
    return best[0], scores[0]


@pytest.mark.parametrize("form", ["labels", "loss"])
@pytest.mark.parametrize("name", every(2, MODELS))
def test_predictions_are_those_of_the_model(name: str, form: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    program = traced(name, model, form)
    cuts = legal_cuts(program)
    stages = split(program, [cuts[len(cuts) // 3], cuts[-1]])
    model.eval()
    for length in (1, 5, LENGTH):
        tokens = ids(1, length)
        with torch.no_grad():
            output = model(tokens)
        row = (output if isinstance(output, Tensor) else output.logits)[0, -1]
        best, scores = predicted(program, stages, tokens[0].tolist())
        assert best == row.topk(len(best)).indices.tolist()
        torch.testing.assert_close(torch.tensor(scores), row.topk(len(best)).values)


def test_a_long_prompt_loses_its_beginning() -> None:
    program = traced("gpt", gpt(), "")
    encoder = PromptEncoder(program)
    tokens = [*range(30)]
    inputs, position = encoder(tokens)
    assert inputs[0][0].tolist() == tokens[-LENGTH:]
    assert position == LENGTH - 1 == encoder.length - 1


@pytest.mark.parametrize("tokens", [[], [VOCAB], [-1], [3, 10**30]])
def test_invalid_prompts(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"at least one token|not in the model's vocabulary"):
        PromptEncoder(traced("gpt", gpt(), ""))(tokens)


@pytest.mark.parametrize("positions", [[], [0, 1], [LENGTH], [-1]])
def test_invalid_positions(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="do not match"):
        best_tokens(torch.zeros(1, LENGTH, VOCAB), positions)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize(("shape", "words"), [((5, 4), "three dimensions"), ((5, 7, 4), "token ids")])
def test_a_model_without_tokens_cannot_generate(shape: tuple[int, ...], words: str) -> None:
    program = trace(
        Regression(), lambda output, y: (output - y).square().mean(), (torch.zeros(shape), torch.zeros(*shape[:-1], 3))
    )
    with pytest.raises(ValueError, match=words):
        PromptEncoder(program)


def test_a_loss_with_weights_keeps_its_cuts() -> None:
    """A loss that has parameters of its own may be cut: such a model has no prediction."""
    head = nn.Linear(VOCAB, 1)

    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            result: Tensor = self.head(output).mean() + next_token_loss(output, targets)
            return result

    assert trace(gpt(), WithHead(), (ids(), ids())).prediction is None


class Scaled(nn.Module):
    """A model that writes to its output, in itself or by its loss."""

    def __init__(self, *, by_itself: bool) -> None:
        super().__init__()
        self.inner, self.by_itself = gpt(), by_itself

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.inner(tokens)
        if self.by_itself:
            output.mul_(-1.0)
        return output


@pytest.mark.parametrize("by_itself", [True, False])
def test_an_output_that_is_written_to_is_predicted_as_returned_or_not_at_all(by_itself: bool) -> None:
    torch.manual_seed(0)
    model = Scaled(by_itself=by_itself)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(output if by_itself else output.mul_(-1.0), targets)

    program = trace(model, loss, (ids(), ids()))
    if program.prediction is not None:
        best, _ = predicted(program, split(program, []), ids(1, 5)[0].tolist())
        with torch.no_grad():
            assert best[0] == int(model.eval()(ids(1, 5))[0, -1].argmax())


@pytest.mark.parametrize(
    "change",
    [
        {"name": "nobody"},
        {"shape": ((1, 0), VOCAB)},
        {"dtype": "int64", "grad": False},
        {"shape": ((1, 0), 1 << 40, VOCAB)},
        {"shape": ((1, 0), LENGTH, VOCAB + 1)},
    ],
)
def test_hostile_predictions_are_rejected(change: dict[str, Any]) -> None:
    program = traced("gpt", gpt(), "")
    cut = legal_cuts(program)[5]
    first, last = split(program, [cut])
    assert first.prediction is None
    assert last.prediction is not None
    with pytest.raises(ProgramError):
        load(dump(msgspec.structs.replace(last, prediction=msgspec.structs.replace(last.prediction, **change))))
    with pytest.raises(ProgramError, match="only the last stage"):
        load(dump(msgspec.structs.replace(first, prediction=first.outputs[0])))
