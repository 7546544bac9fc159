"""Plans made in a process of their own, while the coordinator goes on.

The planner computes for seconds. In a thread of the coordinator's process it would hold Python's lock for most of them,
and whatever comes and goes over the network would wait for that lock, several milliseconds at every turn. So the task
goes to a child process on its standard input and the plan comes back on its standard output, both as MessagePack.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from ..plan.fleet import FleetPlan, Task
from ..plan.form import form
from ..plan.problem import DoesNotFit, PlanError
from ..plan.replan import replan

__all__ = ["form_apart"]

_MODULE = "ravnest.coordinator.planning"


class _Question(msgspec.Struct, frozen=True):
    task: Task
    seed: int
    running: FleetPlan | None = None


class _Found(msgspec.Struct, frozen=True, tag=True):
    plan: FleetPlan


class _NotFound(msgspec.Struct, frozen=True, tag=True):
    """Why there is no plan; `missing_bytes` and `remedies` if it is for want of memory."""

    reason: str
    missing_bytes: int | None = None
    remedies: tuple[str, ...] = ()


def form_apart(task: Task, running: FleetPlan | None = None, *, seed: int = 0, timeout_s: float = 600.0) -> FleetPlan:
    """The plan of `plan.form`, or of `plan.replan` for clusters that ran, or its error.

    `PlanError` too if the process fails or takes too long.
    """
    command = [sys.executable, "-m", _MODULE]
    question = msgspec.msgpack.encode(_Question(task, seed, running))
    try:
        done = subprocess.run(command, input=question, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"the planner found nothing within {timeout_s:g} s") from error
    except OSError as error:
        raise PlanError(f"the planner's process cannot be started: {error}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise PlanError(f"the planner's process ended with code {done.returncode}: {said[-1] if said else 'no word'}")
    answer = msgspec.msgpack.decode(done.stdout, type=_Found | _NotFound)
    if isinstance(answer, _Found):
        return answer.plan
    if answer.missing_bytes is None:
        raise PlanError(answer.reason)
    raise DoesNotFit(answer.reason, answer.missing_bytes, answer.remedies)


def _answer(question: _Question) -> _Found | _NotFound:
    try:
        if question.running is not None:
            return _Found(replan(question.task, question.running).plan)
        return _Found(form(question.task, seed=question.seed))
    except DoesNotFit as error:
        return _NotFound(str(error), error.missing_bytes, error.remedies)
    except PlanError as error:
        return _NotFound(str(error))


def _main() -> None:
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Question)
    sys.stdout.buffer.write(msgspec.msgpack.encode(_answer(question)))


if __name__ == "__main__":
    _main()
