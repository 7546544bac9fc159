"""A plan that a child process makes is the one that would have been made here, and so are its errors."""

from __future__ import annotations

import pytest

from ravnest.coordinator.planning import form_apart
from ravnest.plan import Chain, DoesNotFit, Fleet, Machine, MemoryModel, PlanError, Storage, Task, form


def _task(memory_bytes: float) -> Task:
    chain = Chain(
        forward_s=(1.0, 2.0, 1.5, 0.5), backward_s=(2.0, 4.0, 3.0, 1.0), cuts=(1, 2, 3),
        forward_bytes=(0, 10, 20, 10, 0), backward_bytes=(0, 10, 20, 10, 0),
        weights=tuple(Storage(100, (i,)) for i in range(4)),
    )  # fmt: skip
    machines = tuple(
        Machine(name=f"pc-{i}", memory_bytes=memory_bytes * (i + 1), speed=1.0 + i, up_bytes_per_s=50.0)
        for i in range(5)
    )
    return Task(chain=chain, fleet=Fleet(machines=machines), memory=MemoryModel(base_bytes=0))


def test_the_plan_is_the_same() -> None:
    task = _task(2000.0)
    assert form_apart(task, seed=3) == form(task, seed=3)


def test_what_is_missing_is_said_in_the_same_words() -> None:
    task = _task(1.0)
    with pytest.raises(DoesNotFit) as here:
        form(task)
    with pytest.raises(DoesNotFit) as there:
        form_apart(task)
    assert str(there.value) == str(here.value)
    assert there.value.missing_bytes == here.value.missing_bytes
    assert there.value.remedies == here.value.remedies


def test_a_planner_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(PlanError, match=r"found nothing within 0\.001 s"):
        form_apart(_task(2000.0), timeout_s=0.001)


def test_a_planner_that_cannot_start_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(PlanError, match="cannot be started"):
        form_apart(_task(2000.0))
