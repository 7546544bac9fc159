"""Creates plans, one at a time, and estimates node speeds to find reasons for a replan.

The planner computes for seconds. In a thread of this process it would hold the GIL for most of them, and delay network
I/O by several milliseconds each time. So a task is sent to the standard input of a child process, and the plan is read
from its standard output, both as MessagePack (`plan_in_subprocess`).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ravnest.coordinator.clusters import PreparedCluster
from ravnest.coordinator.context import STATE_FACTOR, CoordinatorContext
from ravnest.coordinator.events import (
    ClusterSpec,
    FleetSpeedEstimated,
    NodeSpeedEstimated,
    PlanCreated,
    PlanFailed,
    ReplanConsidered,
)
from ravnest.coordinator.policy.membership import ConsiderReplan, CreatePlan, decide, machines_of, plannable
from ravnest.coordinator.policy.replication import RestorePlan, plan_restore
from ravnest.coordinator.policy.stragglers import FLEET, StragglerDetector
from ravnest.coordinator.requester import StageFiles
from ravnest.core.metrics import StageMetrics
from ravnest.errors import RavnestError
from ravnest.planner.clusters.search import form_clusters
from ravnest.planner.fleet import FleetPlan, Task
from ravnest.planner.problem import DoesNotFit, PlanError
from ravnest.planner.replan import replan
from ravnest.planner.upgrade import Upgrade, best_upgrade
from ravnest.protocol.control import NodeProfile

__all__ = ["PlanningService", "plan_in_subprocess", "upgrade_in_subprocess"]

_MAX_STAGE_BYTES = 1 << 34
_DEBOUNCE_S = 0.25  # a failure that frees some nodes often frees more: plan them together
_MODULE = "ravnest.coordinator.planning"


def _transfer_s(restore: RestorePlan, profiles: Sequence[NodeProfile], files: Sequence[StageFiles]) -> float:
    """An upper bound for the longest of these transfers, so that slow connections do not fail a cluster."""
    longest_s = 0.0
    for replicas, profile, stage in zip(restore.stages, profiles, files, strict=True):
        for replica in replicas:
            rate = min(replica.up_bytes_per_s, profile.down_bytes_per_s)
            longest_s = max(longest_s, STATE_FACTOR * min(stage.max_bytes, _MAX_STAGE_BYTES) / rate)
    return longest_s


class PlanningService:
    """Plans of the coordinator; runs in its loop."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._task: asyncio.Task[None] | None = None
        self._stragglers = StragglerDetector()
        self._planned_gflops: dict[str, float] = {}  # by node: the measured speed that its plan is based on

    def execute(self, decision: CreatePlan | ConsiderReplan) -> None:
        """Start planning, unless a plan is being computed."""
        running = self._context.running
        if isinstance(decision, ConsiderReplan):
            if not running.is_ending:
                self._start(self._find_better_plan(decision))
        elif not running.is_ending or not running.clusters:  # without a cluster, the weights would be lost
            self._start(self._plan_soon())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        if self._task is not None and not self._task.done():
            work.close()
            return
        failed, self._task = self._task, asyncio.get_running_loop().create_task(work)
        if failed is not None:
            failed.result()  # raises the error of a plan that failed unexpectedly, such as a full disk

    async def _plan_soon(self) -> None:
        await asyncio.sleep(_DEBOUNCE_S)
        for decision in decide(self._context.state, self._context.now_s(), self._context.policy):
            if isinstance(decision, CreatePlan):
                await self._plan(decision.nodes)

    async def _plan(self, nodes: Sequence[str]) -> None:
        context, state = self._context, self._context.state
        start_s, generation = context.now_s(), state.generation + 1
        try:
            machines = machines_of(state, nodes)
            planned = await asyncio.to_thread(
                context.requester.plan, machines, generation, tuple(state.failed_clusters)
            )
            speeds = {machine.name: machine.speed for machine in machines}
            prepared = [await self._prepare(self._as_measured(cluster, speeds)) for cluster in planned.clusters]
        except RavnestError as error:
            context.record(PlanFailed(context.now_s(), str(error), tuple(nodes)))
            return
        free = set(plannable(state, context.now_s(), context.policy))
        usable = [one for one in prepared if free.issuperset(one.spec.members)]
        if len(usable) < len(prepared):
            context.note("a node left while the plan was computed: its cluster is planned again")
        clusters, now_s = tuple(one.spec for one in usable), context.now_s()
        reason = planned.reason
        context.record(
            PlanCreated(now_s, generation, clusters, planned.spares, planned.left_out, reason, now_s - start_s)
        )
        for one in usable:
            self._planned_gflops |= {name: state.nodes[name].profile.gflops for name in one.spec.members}
            context.running.start_cluster(one, context.replication.sources(one.spec.members, one.restore))

    def _as_measured(self, cluster: ClusterSpec, speeds: Mapping[str, float]) -> ClusterSpec:
        """Convert stage seconds from planned speeds to the speeds that the members measured."""
        nodes = self._context.state.nodes
        shares = [speeds[name] / nodes[name].profile.gflops for name in cluster.members]
        seconds = tuple(s * share for s, share in zip(cluster.stage_seconds, shares, strict=False))  # empty if unknown
        return msgspec.structs.replace(cluster, stage_seconds=seconds)

    async def _prepare(self, cluster: ClusterSpec) -> PreparedCluster:
        """Create the files of a cluster, and find the replicas to restore it from."""
        context = self._context
        restore = self._restore_plan(cluster)
        profiles = [context.state.nodes[name].profile for name in cluster.members]
        files = await asyncio.to_thread(
            context.requester.stages, cluster, profiles, restore.missing_stages, restore.missing_frozen
        )
        if restore.updates:
            cluster = msgspec.structs.replace(
                cluster,
                first_update=restore.updates,
                restored_from=restore.description,
                transfer_s=_transfer_s(restore, profiles, files),
            )
        return PreparedCluster(cluster, files, restore)

    def _restore_plan(self, cluster: ClusterSpec) -> RestorePlan:
        context = self._context
        restore = plan_restore(context.state, cluster.members, cluster.cuts, context.now_s(), context.running.updates)
        checkpoint_updates = context.requester.checkpoint_updates() if restore.missing_stages else 0
        return replace(restore, updates=max(restore.updates, checkpoint_updates))

    async def _find_better_plan(self, decision: ConsiderReplan) -> None:
        """Retire the clusters that a sufficiently better plan changes."""
        context, state = self._context, self._context.state
        members = [name for c in decision.clusters for name in state.clusters[c].plan.members]
        machines = machines_of(state, (*members, *decision.nodes))
        try:
            ending, reason = await asyncio.to_thread(context.requester.find_better_plan, machines, decision.clusters)
        except RavnestError as error:
            ending, reason = (), str(error)
        context.record(ReplanConsidered(context.now_s(), decision.nodes, ending, f"{decision.reason}: {reason}"))
        for cluster in ending:
            context.running.retire(cluster, f"a better plan: {reason}")

    # speed estimates

    def handle_step_report(self, name: str, cluster: ClusterSpec, stage: int, metrics: StageMetrics) -> None:
        """Add the metrics of a stage."""
        if cluster.stage_seconds:
            gflops = self._context.state.nodes[name].profile.gflops  # the node may offer another share of its PC now
            expected_s = cluster.stage_seconds[stage] * self._planned_gflops.get(name, gflops) / gflops
            self._stragglers.add_report(name, metrics, expected_s, self._context.now_s())

    def tick(self) -> None:
        """Record new speed estimates; raises the error of a plan that failed unexpectedly."""
        if self._task is not None and self._task.done():
            self._task.result()
        context, now_s = self._context, self._context.now_s()
        known = {name: context.state.nodes[name].speed_factor for name in context.running.members}
        for estimate in self._stragglers.poll({FLEET: context.state.fleet_speed_factor} | known, now_s):
            if estimate.name == FLEET:
                context.record(FleetSpeedEstimated(now_s, estimate.speed, "measured by their stages"))
            else:
                reason = "measured by its stage, relative to other nodes"
                context.record(NodeSpeedEstimated(now_s, estimate.name, estimate.speed, reason))


class _Request(msgspec.Struct, frozen=True):
    task: Task
    seed: int = 0
    running: FleetPlan | None = None
    upgrade_of: FleetPlan | None = None  # search the best upgrade of this plan instead of a plan


class _PlanFound(msgspec.Struct, frozen=True, tag=True):
    plan: FleetPlan


class _UpgradeFound(msgspec.Struct, frozen=True, tag=True):
    upgrade: Upgrade | None


class _NoPlan(msgspec.Struct, frozen=True, tag=True):
    """Why there is no plan; `missing_bytes` and `remedies` if memory is insufficient."""

    reason: str
    missing_bytes: int | None = None
    remedies: tuple[str, ...] = ()


def plan_in_subprocess(
    task: Task, running: FleetPlan | None = None, *, seed: int = 0, timeout_s: float = 600.0
) -> FleetPlan:
    """Run `form_clusters`, or `replan` for running clusters, in a child process.

    Raises:
        PlanError: There is no plan, or the process failed or timed out.
    """
    answer = _ask(_Request(task, seed, running), timeout_s)
    assert isinstance(answer, _PlanFound)
    return answer.plan


def upgrade_in_subprocess(task: Task, plan: FleetPlan, *, timeout_s: float = 60.0) -> Upgrade | None:
    """Run `best_upgrade` in a child process; raises `PlanError` if it failed or timed out."""
    answer = _ask(_Request(task, upgrade_of=plan), timeout_s)
    assert isinstance(answer, _UpgradeFound)
    return answer.upgrade


def _ask(request: _Request, timeout_s: float) -> _PlanFound | _UpgradeFound:
    command = [sys.executable, "-P", "-m", _MODULE]
    body = msgspec.msgpack.encode(request)
    try:
        done = subprocess.run(command, input=body, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"the planner found no plan within {timeout_s:g} s") from error
    except OSError as error:
        raise PlanError(f"cannot start the planner process: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no output"
        raise PlanError(f"the planner process exited with code {done.returncode}: {last}")
    answer = msgspec.msgpack.decode(done.stdout, type=_PlanFound | _UpgradeFound | _NoPlan)
    if not isinstance(answer, _NoPlan):
        return answer
    if answer.missing_bytes is None:
        raise PlanError(answer.reason)
    raise DoesNotFit(answer.reason, answer.missing_bytes, answer.remedies)


def _answer(request: _Request) -> _PlanFound | _UpgradeFound | _NoPlan:
    try:
        if request.upgrade_of is not None:
            return _UpgradeFound(best_upgrade(request.task, request.upgrade_of))
        if request.running is not None:
            return _PlanFound(replan(request.task, request.running).plan)
        return _PlanFound(form_clusters(request.task, seed=request.seed))
    except DoesNotFit as error:
        return _NoPlan(str(error), error.missing_bytes, error.remedies)
    except PlanError as error:
        return _NoPlan(str(error))


def _main() -> None:
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Request)
    sys.stdout.buffer.write(msgspec.msgpack.encode(_answer(request)))


if __name__ == "__main__":
    _main()
