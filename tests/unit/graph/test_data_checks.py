"""Checks on values that only raise are traced as passed; every other branch on values is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.errors import TraceError
from ravnest.graph import trace
from ravnest.graph.verify import verify
from tests.unit.graph.asserting import asserts

Function = Callable[[Tensor], Tensor]


class Apply(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def raises(x: Tensor) -> Tensor:
    if (x > 1e9).any():
        raise ValueError("too large")
    return x


def raises_with_a_message(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all() or (x > 1e9).any():
        message = f"bad values in a tensor of shape {tuple(x.shape)}"
        raise ValueError(message)
    return x


def raises_otherwise(x: Tensor) -> Tensor:
    if (x < 1e9).all():
        x = x * 2
    else:
        raise ValueError("too large")
    return x


def raises_in_a_loop(x: Tensor) -> Tensor:
    for part in x.unbind(1):
        if bool((part > 1e9).any()):
            raise ValueError("too large")
    return x


def raises_by_an_item(x: Tensor) -> Tensor:
    if (x.min() < -1e9).item() or x.max().item() > 1e9:
        raise ValueError("too large")
    return x


def raises_by_a_count(x: Tensor) -> Tensor:
    count = (x > 1e9).sum().item()
    if count > 0:
        raise ValueError(f"{count} are too large")
    return x


def raises_by_torch(x: Tensor) -> Tensor:
    torch._check_tensor_all(x.sum() < 1e9)  # type: ignore[no-untyped-call]
    return x


@contextlib.contextmanager
def noting() -> Iterator[None]:
    try:
        yield
    finally:
        torch.is_grad_enabled()


class Transparent:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def raises_below_managers(x: Tensor) -> Tensor:
    with torch.no_grad(), noting(), Transparent(), contextlib.nullcontext():
        raises(x)
    return x


def raises_again(x: Tensor) -> Tensor:
    try:
        return raises(x)
    except ValueError as error:
        raise RuntimeError("too large") from error
    finally:
        torch.is_grad_enabled()


CHECKS = [
    raises, raises_with_a_message, raises_otherwise, asserts, raises_in_a_loop, raises_by_an_item, raises_by_a_count,
    raises_by_torch, raises_below_managers, raises_again,
]  # fmt: skip


@pytest.mark.parametrize("function", CHECKS, ids=lambda f: f.__name__)
def test_a_check_that_only_raises_is_traced_as_passed(function: Function) -> None:
    batch = torch.rand(3, 4), torch.rand(3, 4)
    model = Apply(function)
    program = trace(model, F.mse_loss, batch)
    assert verify(program, model, F.mse_loss, program.feed(batch), seed=0).is_exact


def test_a_check_that_fails_on_the_first_batch_is_reported() -> None:
    batch = torch.full((3, 4), 1e30), torch.rand(3, 4)
    model = Apply(lambda x: raises(x.abs()))
    program = trace(model, F.mse_loss, batch)
    with pytest.raises(
        TraceError, match="the model's forward pass fails on one of the first batches: ValueError: too large"
    ):
        verify(program, model, F.mse_loss, program.feed(batch), seed=0)


def chooses(x: Tensor) -> Tensor:
    if (x > 0).any():
        return x * 2
    return x


def returns_early(x: Tensor) -> Tensor:
    if (x > 0).any():
        if x.shape[1] > 2:
            return x * 2
        raise ValueError("narrow")
    return x


def catches(x: Tensor) -> Tensor:
    try:
        return raises(x)
    except ValueError:
        return x * 2


def counts(x: Tensor) -> Tensor:
    n = 0
    while (x > n).any():
        n += 1
    return x * n


def selects(x: Tensor) -> Tensor:
    return x * 2 if (x > 0).any() else x


def keeps_the_truth(x: Tensor) -> Tensor:
    is_positive = bool((x > 0).all())
    if is_positive:
        raise ValueError("positive")
    return x * (1 - is_positive)


def suppresses(x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        x = raises(x) * 2
    return x + 1


@contextlib.contextmanager
def swallowing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        str(error)


class Swallowing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> bool:
        return True


def swallows(x: Tensor) -> Tensor:
    with swallowing():
        x = raises(x) * 2
    return x + 1


def swallows_in_a_class(x: Tensor) -> Tensor:
    with Swallowing():
        x = raises(x) * 2
    return x + 1


@swallowing()
def decorated(x: Tensor) -> Tensor:
    return raises(x)


def returns_at_last(x: Tensor) -> Tensor:
    try:
        x = raises(x) * 2
    finally:
        return x  # noqa: B012


def catches_its_own(x: Tensor) -> Tensor:
    if (x > 1e9).any():
        try:
            raise ValueError("too large")
        except ValueError:
            x = x * 3
    return x


class Layers:
    """Gives numbers until the values are too large."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.count = x, 0

    def __iter__(self) -> Layers:
        return self

    def __next__(self) -> int:
        self.count += 1
        if self.count > 3 or (self.x > 1e9).any():
            raise StopIteration
        return self.count


class OldLayers(Layers):
    __iter__ = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> int:
        if index > 2:
            raise IndexError
        if (self.x > 1e9).any():
            raise IndexError(index)
        return index

    @property
    def is_small(self) -> bool:
        if (self.x > 1e9).any():
            raise AttributeError("is_small")
        return True


def iterates(x: Tensor) -> Tensor:
    return x + sum(Layers(x))


def indexes(x: Tensor) -> Tensor:
    layers = OldLayers(x)
    return x + layers[0] + layers[1]


def asks_for_an_attribute(x: Tensor) -> Tensor:
    return x * 2 if hasattr(OldLayers(x), "is_small") else x


def without_source() -> Function:
    made: dict[str, Any] = {"raises": raises}
    lines = "def hidden(x):\n  try:\n    return raises(x)\n  except ValueError:\n    return x * 2\n"
    exec(compile(lines, "<no file>", "exec"), made)  # noqa: S102  # as in an interactive session
    return made["hidden"]  # type: ignore[no-any-return]


def draws_and_writes(x: Tensor) -> Tensor:
    number = torch.rand([])
    number.sub_(0.5)
    return x * 2 if number < 0 else x


def falls_back(x: Tensor) -> Tensor:
    try:
        if (x > 1e9).any():
            x = x * 2
    except Exception:
        x = x + 0
    return x


def falls_back_from_a_count(x: Tensor) -> Tensor:
    try:
        for _ in range((x > 1e9).sum()):
            x = x * 2
    except Exception:
        x = x + 0
    return x


def falls_back_from_a_number(x: Tensor) -> Tensor:
    try:
        x = x * (1 + int((x > 1e9).sum().item()))
    except Exception:
        x = x + 0
    return x


CHOICES = [
    chooses, returns_early, catches, counts, selects, keeps_the_truth, suppresses, swallows, swallows_in_a_class,
    decorated, returns_at_last, catches_its_own, iterates, indexes, asks_for_an_attribute, without_source(),
    draws_and_writes, falls_back, falls_back_from_a_count, falls_back_from_a_number,
]  # fmt: skip


def test_a_caught_read_of_values_is_refused() -> None:
    def falls_back_from_numpy(x: Tensor) -> Tensor:
        try:
            return x * float(x.detach().numpy().max() > 1e9)
        except RuntimeError:
            return x * 0

    with pytest.raises(TraceError, match="numpy"):
        trace(Apply(falls_back_from_numpy), F.mse_loss, (torch.rand(3, 4), torch.rand(3, 4)))


@pytest.mark.parametrize("function", CHOICES, ids=lambda f: f.__name__)
def test_a_branch_that_changes_the_result_is_refused(function: Function, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceError, match=r"depends on the values of its tensors, at .*test_data_checks\.py"):
        trace(Apply(function), F.mse_loss, (torch.rand(3, 4), torch.rand(3, 4)))
    assert capfd.readouterr() == ("", "")  # torch prints the graph of a model that it cannot export


def test_truth_values_are_as_before_after_a_trace() -> None:
    before = Tensor.__bool__
    trace(Apply(raises), F.mse_loss, (torch.rand(3, 4), torch.rand(3, 4)))
    assert Tensor.__bool__ is before
