"""Real models with real losses for tests and benchmarks. Random weights, random data, fixed seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss

VOCAB = 512


@dataclass(frozen=True)
class Case:
    """A model to split: functions that build it, compute its loss and make a batch of n samples."""

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[..., Any] | None
    batch: Callable[[int], Any]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _ids(n: int, length: int = 32, vocab: int = VOCAB) -> Tensor:
    return torch.randint(0, vocab, (n, length), generator=_generator())


def _text(n: int) -> tuple[Tensor, Tensor]:
    ids = _ids(n)
    return ids, ids.roll(-1, 1)


def _padding(n: int, length: int = 32) -> Tensor:
    mask = torch.ones(n, length, dtype=torch.int64)
    mask[:, length - 7 :] = 0
    return mask


def _images(n: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    g = _generator()
    return torch.randn(n, 3, size, size, generator=g), torch.randint(0, classes, (n,), generator=g)


def gpt(tied: bool = False, **changes: Any) -> Case:
    settings = {"vocab": VOCAB, "context": 32, "layers": 4, "width": 96, "heads": 4, "tied": tied, **changes}
    config = GPTConfig(**settings)
    return Case("gpt_tied" if tied else "gpt", lambda: GPT(config), next_token_loss, _text)


def _logits_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def gpt2(**changes: Any) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"n_layer": 3, "n_embd": 96, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, **changes}
    config = GPT2Config(use_cache=False, **settings)
    return Case(
        "gpt2",
        lambda: GPT2LMHeadModel(config),
        _logits_loss,
        lambda n: ({"input_ids": _ids(n), "attention_mask": _padding(n)}, _ids(n).roll(-1, 1)),
    )


def llama(**changes: Any) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 256, "vocab_size": VOCAB, **changes,
    }  # fmt: skip
    config = LlamaConfig(use_cache=False, **settings)
    return Case(
        "llama",
        lambda: LlamaForCausalLM(config),
        _logits_loss,
        lambda n: ({"input_ids": _ids(n), "attention_mask": _padding(n)}, _ids(n).roll(-1, 1)),
    )


def bert(**changes: Any) -> Case:
    """Masked language modelling plus next-sentence prediction; the mask is used by every layer."""
    from transformers import BertConfig, BertForPreTraining

    settings = {
        "num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 256,
        "vocab_size": VOCAB, "max_position_embeddings": 64, **changes,
    }  # fmt: skip
    config = BertConfig(**settings)

    def batch(n: int) -> Any:
        labels = _ids(n).masked_fill(_ids(n, vocab=10) > 1, -100)
        inputs = {"input_ids": _ids(n), "attention_mask": _padding(n), "token_type_ids": _ids(n, vocab=2)}
        return {**inputs, "labels": labels, "next_sentence_label": _ids(n, 1, 2)[:, 0]}

    return Case("bert", lambda: BertForPreTraining(config), None, batch)


def _accuracy_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    correct = (logits.argmax(1) == targets).float().mean()
    return F.cross_entropy(logits, targets, label_smoothing=0.1), {"accuracy": correct}


def resnet50() -> Case:
    from torchvision.models import resnet50 as build

    return Case("resnet50", lambda: build(num_classes=100), _accuracy_loss, lambda n: _images(n, 64, 100))


def _inception_loss(output: Any, targets: Tensor) -> Tensor:
    main, auxiliary = output
    return F.cross_entropy(main, targets) + 0.4 * F.cross_entropy(auxiliary, targets)


def inception_v3() -> Case:
    from torchvision.models import inception_v3 as build

    return Case(
        "inception_v3",
        lambda: build(num_classes=100, aux_logits=True, init_weights=False),
        _inception_loss,
        lambda n: _images(n, 299, 100),
    )


def digits() -> Case:
    from sklearn.datasets import load_digits

    from ravnest.examples.digits_cnn import DigitsCNN

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    targets = torch.tensor(data.target)
    return Case("digits_cnn", DigitsCNN, _accuracy_loss, lambda n: (images[:n], targets[:n]))


def text_cases() -> list[Case]:
    return [gpt(), gpt(tied=True), gpt2(), bert(), llama()]


def image_cases() -> list[Case]:
    return [digits(), resnet50(), inception_v3()]


def all_cases() -> list[Case]:
    return [*text_cases(), *image_cases()]


def bench_cases() -> list[Case]:
    """The same models, large enough that arithmetic dominates a step."""
    gpt2_size = {"n_layer": 6, "n_embd": 384, "n_head": 6}
    llama_size = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1024}
    bert_size = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    gpt_size: dict[str, Any] = {"layers": 6, "width": 384, "heads": 6}
    text = [gpt(**gpt_size), gpt(tied=True, **gpt_size), gpt2(**gpt2_size), bert(**bert_size), llama(**llama_size)]
    return [*text, *image_cases()]


def gpt2_xl() -> Case:
    """1.5 billion parameters."""
    return gpt2(n_layer=48, n_embd=1600, n_head=25, vocab_size=50257, n_positions=1024)


def llama_1b() -> Case:
    """About a billion parameters, embeddings and head included."""
    return llama(
        num_hidden_layers=16, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
        vocab_size=32000,
    )  # fmt: skip
