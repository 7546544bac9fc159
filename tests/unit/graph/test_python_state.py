"""A model that changes outside its parameters and buffers is refused; one that keeps a cache is not."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.errors import TraceError
from ravnest.graph import trace
from ravnest.graph.verify import verify

LATE = 1000  # forward passes before the state changes the loss
CALLS = {"count": 0}


class Stateful(nn.Module):
    """Doubles its output when `read` finds that it ran often enough, which no test does."""

    calls = 0

    def __init__(self, state: Any, read: Callable[[Stateful], float]) -> None:
        super().__init__()
        self.layer, self.state, self.read = nn.Linear(4, 4), state, read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if self.read(self) > LATE else 1)  # type: ignore[no-any-return]


class Counter:
    count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


def of_class(model: Stateful) -> int:
    type(model).calls += 1
    return type(model).calls


def of_attribute(model: Stateful) -> Any:
    model.state += 1
    return model.state


def of_dict(model: Stateful) -> Any:
    model.state["calls"] += 1
    return model.state["calls"]


def of_list(model: Stateful) -> int:
    model.state.append(0)
    return len(model.state)


def of_global(model: Stateful) -> int:
    CALLS["count"] += 1
    return CALLS["count"]


def of_closure() -> Callable[[Stateful], int]:
    count = 0

    def read(model: Stateful) -> int:
        nonlocal count
        count += 1
        return count

    return read


CHANGING: dict[str, Callable[[], Stateful]] = {
    "number": lambda: Stateful(0, of_attribute),
    "dict": lambda: Stateful({"calls": 0}, of_dict),
    "list": lambda: Stateful([], of_list),
    "deque": lambda: Stateful(deque(), of_list),
    "namespace": lambda: Stateful(SimpleNamespace(counter=Counter()), lambda model: model.state.counter.next()),
    "object": lambda: Stateful(Counter(), lambda model: model.state.next()),
    "count": lambda: Stateful(itertools.count(), lambda model: next(model.state)),
    "class": lambda: Stateful(None, of_class),
    "closure": lambda: Stateful(None, of_closure()),
    "global": lambda: Stateful(None, of_global),
    "bound method": lambda: Stateful(None, (lambda counter: lambda model: counter())(Counter().next)),
    "Python's generator": lambda: Stateful(random.Random(0), lambda model: model.state.random()),
    "NumPy's generator": lambda: Stateful(np.random.default_rng(0), lambda model: model.state.random()),
    "old NumPy's generator": lambda: Stateful(np.random.RandomState(0), lambda model: model.state.rand()),
}


def verified(model: nn.Module) -> bool:
    batch = torch.rand(3, 4), torch.rand(3, 4)
    program = trace(model, F.mse_loss, batch)
    return verify(program, model, F.mse_loss, program.feed(batch), seed=0).is_exact


@pytest.mark.parametrize("name", CHANGING)
def test_a_model_that_changes_in_each_forward_pass_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match=r"changes outside its buffers when it runs: model\..*keep it in a buffer"):
        verified(CHANGING[name]())


def test_the_changed_value_is_named() -> None:
    with pytest.raises(TraceError, match=r"model\.1\.state\['calls'\] is \d+ after one step, \d+ after two"):
        verified(nn.Sequential(nn.Linear(4, 4), Stateful({"calls": 0}, of_dict)))


def test_a_loss_that_counts_is_refused() -> None:
    count = of_closure()

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(y, t) * (2 if count(None) > LATE else 1)  # type: ignore[arg-type]

    batch, model = (torch.rand(3, 4), torch.rand(3, 4)), nn.Linear(4, 4)
    program = trace(model, loss, batch)
    with pytest.raises(TraceError, match=r"changes outside its buffers when it runs: .*loss"):
        verify(program, model, loss, program.feed(batch), seed=0)


def test_a_hook_that_counts_is_refused() -> None:
    model, count = nn.Linear(4, 4), of_closure()
    model.weight.register_hook(lambda g: g * (2 if count(None) > LATE else 1))  # type: ignore[no-untyped-call,arg-type]
    with pytest.raises(TraceError, match=r"changes outside its buffers when it runs: model\.weight, its hooks"):
        verified(model)


def caches(model: Stateful) -> int:
    model.state.setdefault("table", torch.arange(4.0))
    model.state["shape"] = (3, 4)
    return 0


KEEPING: dict[str, Callable[[], Stateful]] = {
    "cache": lambda: Stateful({}, caches),
    "the system's generator": lambda: Stateful(random.SystemRandom(), lambda model: 0),
    "itself": lambda: Stateful({}, lambda model: model.state.setdefault("itself", model) is None),
}


@pytest.mark.filterwarnings("ignore:The tensor attribute")  # of torch, about caches
@pytest.mark.parametrize("name", KEEPING)
def test_a_model_that_keeps_a_cache_trains(name: str) -> None:
    assert verified(KEEPING[name]())
