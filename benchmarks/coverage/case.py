"""One model to try, and the outcome: exact, refused with a reason, or wrong."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ravnest.errors import RavnestError
from ravnest.graph import trace
from ravnest.graph.batch import flatten, split_batch, unflatten
from ravnest.graph.verify import verify

__all__ = ["Case", "Outcome", "examine"]

_SEED = 5
_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Case:
    """`build` makes the model, `batch` a batch. `loss` is None if the model returns its own loss."""

    name: str
    group: str
    build: Callable[[], nn.Module]
    loss: Callable[..., Any] | None
    batch: Callable[[], Any]


@dataclass(frozen=True)
class Outcome:
    """`kind`: exact (equal to the last bit), close (within rounding), refused, wrong, or broken (not by us)."""

    name: str
    group: str
    form: str  # instance or builder
    kind: str
    reason: str = ""


def examine(case: Case, form: str) -> Outcome:
    """Trace a case, cut it in three, pass it through the wire form, and compare two optimizer steps with PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _run_plain(case)
        except Exception as error:  # whatever a model raises in plain PyTorch, it is not to be covered
            return Outcome(case.name, case.group, form, "broken", f"{type(error).__name__}: {error}"[:200])
        try:
            is_exact = _compare(case, form)
        except (RavnestError, ValueError) as error:
            kind = "differs" if "does not train as the model does" in str(error) else "refused"
            return Outcome(case.name, case.group, form, kind, str(error)[:400])
        except Exception as error:  # a crash instead of a refusal: to be mended
            return Outcome(case.name, case.group, form, "crashed", f"{type(error).__name__}: {error}"[:400])
    return Outcome(case.name, case.group, form, "exact" if is_exact else "close")


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)
    return build()


def _run_plain(case: Case) -> None:
    model = _seeded(case.build).train()
    structure, leaves = flatten(split_batch(case.batch(), case.loss is not None), "batch")
    batch = unflatten(structure, [leaf for _, leaf in leaves])
    inputs = batch["inputs"]
    output = (
        model(**inputs)
        if isinstance(inputs, Mapping)
        else model(*inputs)
        if isinstance(inputs, list | tuple)
        else model(inputs)
    )
    loss = output["loss"] if case.loss is None else case.loss(output, batch["targets"])
    loss.backward()


def _compare(case: Case, form: str) -> bool:
    batch = case.batch()
    model: Any = case.build if form == "builder" else _seeded(case.build)
    program = trace(model, case.loss, batch)
    leaves = program.feed(batch)
    is_exact = verify(program, model, case.loss, leaves, seed=_SEED).is_exact
    if form == "builder":
        return is_exact
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():  # another point: the program reads the model's own tensors
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter), alpha=_LEARNING_RATE)
    return is_exact and verify(program, model, case.loss, leaves, seed=_SEED).is_exact
