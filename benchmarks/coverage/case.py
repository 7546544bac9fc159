"""One model to try, and the outcome: exact, refused with a reason, or wrong."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ravnest.errors import FixedBatchSize, RavnestError, TraceError
from ravnest.graph import trace
from ravnest.graph.batch import flatten, split_batch, unflatten
from ravnest.graph.verify import verify

__all__ = ["FORMS", "Case", "NotTried", "Outcome", "Subject", "examine", "run_plain"]

FORMS = ("instance", "builder")
_SEED = 5
_LEARNING_RATE = 0.01


class NotTried(Exception):
    """Plain PyTorch cannot train the model as it would be tried."""


@dataclass(frozen=True)
class Case:
    """`build` makes the model, `batch` a batch. `loss` is None if the model returns its own loss."""

    name: str
    group: str
    build: Callable[[], nn.Module]
    loss: Callable[..., Any] | None
    batch: Callable[[], Any]
    forms: tuple[str, ...] = FORMS


@dataclass(frozen=True)
class Subject:
    """A model to try in one or more ways. `cases` makes them, or raises `NotTried`."""

    name: str
    group: str
    cases: Callable[[], list[Case]]


@dataclass(frozen=True)
class Outcome:
    """The result of trying a case in one form.

    `kind`: exact (equal to the last bit), close (within rounding), refused before the first step, wrong (it differs
    after a step, although the check before the first one passed), crashed (an error of ours), or not tried.
    """

    name: str
    group: str
    form: str  # instance or builder, and with a loss function
    kind: str
    reason: str = ""
    seconds: float = 0.0


def examine(case: Case, form: str) -> Outcome:
    """Trace a case, cut it in three, pass it through the wire form, and compare two optimizer steps with PyTorch."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, reason = _tried(case, form)
    label = form if case.loss is None else f"{form}, loss function"
    return Outcome(case.name, case.group, label, kind, reason, time.perf_counter() - start)


def _tried(case: Case, form: str) -> tuple[str, str]:
    try:
        run_plain(case)
    except Exception as error:  # whatever a model raises in plain PyTorch, it is not to be covered
        return "not tried", f"{type(error).__name__}: {error}"[:200]
    try:
        return ("exact" if _compare(case, form) else "close"), ""
    except _Wrong as error:
        return "wrong", str(error)[:600]
    except (RavnestError, ValueError) as error:
        return "refused", str(error)[:600]
    except Exception as error:  # a crash instead of a refusal: to be mended
        return "crashed", f"{type(error).__name__}: {error}"[:600]


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)
    return build()


def run_plain(case: Case) -> None:
    """One step of plain PyTorch; raises what the model raises, and `NotTried` if nothing would be trained."""
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
    loss: Tensor = output["loss"] if case.loss is None else case.loss(output, batch["targets"])
    loss.backward()  # type: ignore[no-untyped-call]
    if not torch.isfinite(loss) or all(p.grad is None for p in model.parameters()):
        raise NotTried("plain PyTorch gives no finite loss or no gradient")


def _compare(case: Case, form: str) -> bool:
    batch = case.batch()
    model: Any = case.build if form == "builder" else _seeded(case.build)
    try:
        program = trace(model, case.loss, batch)
    except FixedBatchSize:  # as a job does with one microbatch per step
        program = trace(model, case.loss, batch, dynamic_batch=False)
    leaves = program.feed(batch)
    is_exact = verify(program, model, case.loss, leaves, seed=_SEED).is_exact
    if form == "builder":
        return is_exact
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():  # another point: the program reads the model's own tensors
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter), alpha=_LEARNING_RATE)
    try:
        return is_exact and verify(program, model, case.loss, leaves, seed=_SEED).is_exact
    except TraceError as error:
        raise _Wrong(str(error)) from error


class _Wrong(Exception):
    """The program trains something else than the model, and the check before the first step did not find it."""
