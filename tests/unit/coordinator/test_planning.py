"""A plan of a child process is the same as one of this process, and so are its errors."""

from __future__ import annotations

import pytest

from ravnest.coordinator.planning import plan_in_subprocess
from ravnest.planner import Chain, DoesNotFit, Fleet, Machine, MemoryModel, PlanError, Storage, Task
from ravnest.planner.clusters.search import form_clusters


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
    assert plan_in_subprocess(task, seed=3) == form_clusters(task, seed=3)


def test_the_error_is_the_same() -> None:
    task = _task(1.0)
    with pytest.raises(DoesNotFit) as here:
        form_clusters(task)
    with pytest.raises(DoesNotFit) as there:
        plan_in_subprocess(task)
    assert str(there.value) == str(here.value)
    assert there.value.missing_bytes == here.value.missing_bytes
    assert there.value.remedies == here.value.remedies


def test_a_planner_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(PlanError, match=r"found no plan within 0\.001 s"):
        plan_in_subprocess(_task(2000.0), timeout_s=0.001)


def test_a_planner_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(PlanError, match="cannot start"):
        plan_in_subprocess(_task(2000.0))
