"""Batches in the forms that users have them: what a model gets from them, and what is rejected with a sentence."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BatchEncoding

from ravnest.graph import trace
from ravnest.graph.batch import flatten, split_batch, unflatten
from ravnest.graph.verify import verify

X, Y = torch.arange(12.0).view(3, 4) / 12, torch.ones(3)


class Pair(NamedTuple):
    inputs: Any
    targets: Any


@dataclass
class Record:
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Named:
    x: Tensor
    labels: Tensor
    scale: float = 2.0


class Model(nn.Module):
    """Takes one input, in any container, and an optional factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Any, scale: float = 1.0) -> Tensor:
        if isinstance(x, Record):
            x = x.x * x.y[:, None]
        elif isinstance(x, BatchEncoding):
            x = x.x  # an attribute, as encodings have
        elif isinstance(x, list):
            x = [*x, *[t * 2 for t in x]][-1]
        elif isinstance(x, tuple):
            x = x[0]
        result: Tensor = self.linear(x)[:, 0] * scale
        return result


class WithLoss(Model):
    def forward(self, x: Any, labels: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
        return {"loss": F.mse_loss(super().forward(x, scale), labels)}


ACCEPTED: dict[str, Any] = {
    "tuple": (X, Y),
    "list": [X, Y],
    "named tuple": Pair(X, Y),
    "dataclass of two": Record(X, Y),
    "dataclass with labels": Named(X, Y),
    "mapping of both": {"inputs": X, "targets": Y},
    "mapping with labels": {"x": X, "labels": Y},
    "encoding with labels": BatchEncoding({"x": X, "labels": Y}),
    "user dict": collections.UserDict(x=X, labels=Y),
    "keyword arguments": ({"x": X, "scale": 0.5}, Y),
    "positional arguments": ((X, 0.5), Y),
    "nested list": (([X, X],), Y),
    "nested tuple": (((X, X),), Y),
    "nested dataclass": (Record(X, Y), Y),
    "nested encoding": ((BatchEncoding({"x": X}),), Y),
    "numpy": (X.numpy(), Y.numpy()),
    "numpy numbers": ((X, np.float64(0.5)), Y),
    "constants": ({"x": X, "scale": True}, Y),
    "strided": (X.repeat(1, 2)[:, ::2], Y),
    "transposed": (X.T.contiguous().T, Y),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_model_gets_what_the_user_wrote(name: str) -> None:
    batch, model = ACCEPTED[name], Model()
    program = trace(model, F.mse_loss, batch)
    assert verify(program, model, F.mse_loss, program.feed(batch), seed=0).is_exact


@pytest.mark.parametrize(
    "batch",
    [{"x": X, "labels": Y}, BatchEncoding({"x": X, "labels": Y}), collections.OrderedDict(x=X, labels=Y), (X, Y)],
)
def test_without_a_loss_the_batch_is_the_inputs(batch: Any) -> None:
    model = WithLoss()
    program = trace(model, None, batch)
    assert verify(program, model, None, program.feed(batch), seed=0).is_exact


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.float64, torch.uint8, torch.float16])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    batch = (X > 0.5).to(dtype), Y
    program = trace(Model(), lambda y, t: F.mse_loss(y, t), (batch[0].float(), Y))
    with pytest.raises(ValueError, match="the program was traced for float32"):
        program.feed(batch)
    assert flatten(batch, "batch")[1][0][1].dtype is dtype


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_batch_survives_flattening(name: str) -> None:
    structure, leaves = flatten(ACCEPTED[name], "batch")
    again, leaves_again = flatten(unflatten(structure, [leaf for _, leaf in leaves]), "batch")
    assert again == structure
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(leaves, leaves_again, strict=True))


SAMPLE = (torch.ones(4), torch.ones(()))
REJECTED: dict[str, tuple[Any, str]] = {
    "gradients": ((X.clone().requires_grad_(), Y), r"batch\.inputs of the batch requires gradients.* detach it"),
    "meta": ((X.to("meta"), Y), "is on the meta device"),
    "sparse": ((X.to_sparse(), Y), "not a dense tensor"),
    "dtype": ((X.to(torch.complex128), Y), "is complex128: convert it"),
    "text array": ((X, np.array(["a", "b", "c"])), r"batch\.targets of the batch is a NumPy array of <U1"),
    "object": (({"x": X, "image": object()}, Y), r"batch\.inputs\.image of the batch is a object.* collator"),
    "samples": ([SAMPLE] * 3, "a list of 3 samples.* collator"),
    "dict samples": ([{"x": torch.ones(4), "y": 1}] * 5, "a list of 5 samples"),
    "three": ((X, Y, Y), "must be a pair .*got 3 items"),
    "tensor": (X, "must be a pair .*got a Tensor"),
    "no labels": ({"x": X, "y": Y}, "mapping with 'labels'.*got a dict with x, y"),
    "both labels": ({"x": X, "labels": Y, "targets": Y}, "got a dict with x, labels, targets"),
    "a set": (({X}, Y), "is a set"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name: str) -> None:
    batch, message = REJECTED[name]
    with pytest.raises(ValueError, match=message):
        flatten(split_batch(batch, has_targets=True), "batch")


def test_samples_are_rejected_without_a_loss() -> None:
    with pytest.raises(ValueError, match="a list of 2 samples"):
        split_batch([{"x": torch.ones(4)}, {"x": torch.ones(4)}], has_targets=False)


DIFFERENT: dict[str, tuple[Any, str]] = {
    "number": (({"x": X, "scale": 3.0}, Y), r"batch 1: batch\.inputs\.scale is 3\.0, it was 0\.5 in the first batch"),
    "text": (({"x": X, "scale": "a"}, Y), r"scale is 'a', it was 0\.5 .* leave out text in the collator"),
    "none": (({"x": X, "scale": None}, Y), r"scale is None, it was 0\.5"),
    "missing": (({"x": X}, Y), "batch.inputs has other keys than in the first batch.*: scale"),
    "container": (((X, 0.5), Y), r"batch\.inputs is a tuple, it was a dict"),
    "dtype": (({"x": X.double(), "scale": 0.5}, Y), "is float64 in batch 1 and float32 in the first"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_batches_must_match_each_other(name: str) -> None:
    other, message = DIFFERENT[name]
    with pytest.raises(ValueError, match=message):
        trace(Model(), F.mse_loss, ({"x": X, "scale": 0.5}, Y), others=[other])
