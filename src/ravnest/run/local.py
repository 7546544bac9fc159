"""Prepares a run on this machine: a fleet on one host.

The coordinator runs in a thread of this process, and so do the agents of N nodes, each with its worker process. Links
are unix sockets in a private directory: no TLS, no enrollment, and the machine is measured once.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ravnest import __version__
from ravnest.coordinator.events import ClusterSpec
from ravnest.coordinator.policy.averaging import AveragingPolicy
from ravnest.coordinator.policy.membership import MembershipPolicy
from ravnest.coordinator.policy.replication import ReplicationPolicy
from ravnest.coordinator.requester import PlannedClusters
from ravnest.coordinator.service import CoordinatorConfig
from ravnest.core.units import UNLIMITED_BYTES
from ravnest.node.agent import Agent, AgentConfig
from ravnest.node.console import AgentConsole
from ravnest.node.membership import LocalMembership
from ravnest.node.storage import NodeStorage
from ravnest.node.worker_process import SpawnWorker, fork_server
from ravnest.planner.fleet import Machine
from ravnest.protocol.commands import StageFailed
from ravnest.protocol.control import NodeProfile, StageReport
from ravnest.run.checkpoint.resume import plan_as_before
from ravnest.run.cluster_builder import ClusterBuilder, cluster_names
from ravnest.run.local_devices import LocalDevices
from ravnest.run.metrics import ProgressView
from ravnest.run.plan import Cores, LocalPlanOptions, LocalTimings, PipelinePlan, node_names, plan_local, time_local
from ravnest.run.traced_job import TracedJob

__all__ = ["LocalNode", "LocalNodes", "local_builder", "local_coordinator", "local_nodes"]

_GFLOPS = 1.0  # nominal: fixed clusters are planned by `speeds` alone
_LINE_BYTES_PER_S = 1e10
_FORMING_S = 300.0
_HEARTBEAT_S = 10.0  # its supervisor detects a dead worker; this only guards against a stuck loop
_PLANNED_HEARTBEAT_S = 2.0  # of planned clusters, which do without a node that is lost
_REPLAN_S = 5.0  # state moves within this machine: a better plan costs little


class LocalClusterBuilder(ClusterBuilder):
    """Plans fixed groups of local nodes, each of which forms the same cluster again after a failure."""

    def __init__(self, job: TracedJob, timings: LocalTimings, view: ProgressView) -> None:
        super().__init__(
            job.program, timings.chain, job.trainer, job.folder, job.start_weights, accumulate=timings.accumulate,
            microbatch=timings.microbatch,
        )  # fmt: skip
        self.checkpoint = job.start
        self._plans = [plan_local(timings, group) for group in timings.options.groups]
        if job.start is not None and job.config.memory is None:
            self._plans, messages = _as_before(self._plans, job)
            for text in messages:
                view.message(text)

    def plan(
        self, machines: Sequence[Machine], generation: int, failed_clusters: Sequence[str] = ()
    ) -> PlannedClusters:
        """Return the clusters of all groups whose nodes are free."""
        self._machines |= {machine.name: machine for machine in machines}
        free = {machine.name for machine in machines}
        ready = [plan for plan in self._plans if free.issuperset(row.node for row in plan.plans)]
        names = cluster_names(generation, len(ready))
        specs = [self._spec(name, generation, plan, failed_clusters) for name, plan in zip(names, ready, strict=True)]
        return PlannedClusters(tuple(specs), reason="nodes of this machine")

    def find_better_plan(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        return (), "local clusters are fixed"

    def _spec(self, name: str, generation: int, plan: PipelinePlan, failed_clusters: Sequence[str]) -> ClusterSpec:
        self.plans[name] = plan
        members = tuple(row.node for row in plan.plans)
        repairs = [old for old in failed_clusters if old in self.plans and self.plans[old].plans[0].node == members[0]]
        return ClusterSpec(
            id=name, generation=generation, members=members, cuts=tuple(plan.cuts), accumulate=plan.accumulate,
            depths=tuple(rule.depth for rule in plan.rules), samples_per_s=plan.samples_per_s, reason=plan.reason,
            repairs=repairs[-1] if repairs else "",
        )  # fmt: skip


def local_builder(job: TracedJob, view: ProgressView, num_cores: int, devices: LocalDevices) -> LocalClusterBuilder:
    """Measure the job on this machine and plan its clusters."""
    config = job.config
    options = LocalPlanOptions(
        nodes=config.num_nodes, clusters=config.clusters, batch_size=job.batch_size,
        accumulate=config.microbatches_per_step, microbatch=config.microbatch, synchronous=config.is_synchronous,
        max_staleness=config.max_staleness, memory_mode=config.memory_mode,
        memory_bytes=devices.memory_bytes, recompute=config.recomputes, speeds=devices.speeds,
        on_processor=devices.on_processor,
        cores=Cores(count=num_cores, threads=config.num_threads, pinned=config.core_of),
    )  # fmt: skip
    return LocalClusterBuilder(job, time_local(job.program, job.optimizer, config.correction, options), view)


def local_coordinator(job: TracedJob, averaging: AveragingPolicy, sockets: Path) -> CoordinatorConfig:
    """Return the configuration of a coordinator without a port."""
    config = job.config
    return CoordinatorConfig(
        directory=job.folder / "coordinator",
        port=None,
        sockets=sockets,
        local_nodes=node_names(config.num_nodes),
        averaging=averaging,
        replication=ReplicationPolicy(replicas=config.replicas),
        membership=MembershipPolicy(
            min_nodes=config.num_nodes, settle_s=0.0, min_stages=1 if config.clusters else config.least_stages,
            quarantine_s=0.0, forming_timeout_s=_FORMING_S, replan_interval_s=_REPLAN_S,
            heartbeat_s=_HEARTBEAT_S if config.clusters else _PLANNED_HEARTBEAT_S, num_spares=config.spares,
        ),
    )  # fmt: skip


@contextlib.contextmanager
def local_nodes(job: TracedJob, devices: LocalDevices, gflops: float = _GFLOPS) -> Iterator[LocalNodes]:
    """Prepare the nodes of a local run; their files are removed afterwards.

    `gflops` is the speed of a core, as the planner of the clusters measured it.
    """
    config = job.config
    sockets = Path(tempfile.mkdtemp(prefix="ravnest-"))
    directory = job.folder / ".nodes"
    memory = devices.memory_bytes or (UNLIMITED_BYTES,) * config.num_nodes
    cores = config.core_of or (-1,) * config.num_nodes
    shares = config.share_of or (1.0,) * config.num_nodes
    speeds = [1.0 if is_cpu else (devices.speeds or shares)[i] for i, is_cpu in enumerate(devices.on_processor)]
    nodes = [
        LocalNode(
            name=name,
            memory_bytes=memory[i],
            processor_share=shares[i],
            core=cores[i],
            device=devices.names[i],
            speed=speeds[i],
        )
        for i, name in enumerate(node_names(config.num_nodes))
    ]
    try:
        with fork_server() as spawn:
            resources = _Resources(sockets, directory, job.folder, spawn, gflops, config.num_threads)
            yield LocalNodes(nodes, resources)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class LocalNode:
    """A node of this machine: its memory, the share of a core that it uses, its core (-1: any), and its device.

    `speed` is that of the device relative to a core.
    """

    name: str
    memory_bytes: int = UNLIMITED_BYTES
    processor_share: float = 1.0
    core: int = -1
    device: str = "cpu"
    speed: float = 1.0


@dataclass(frozen=True)
class _Resources:
    """What the nodes of a run share: directories, the way to start a worker, and the speed and threads of each."""

    sockets: Path
    directory: Path
    folder: Path
    spawn: SpawnWorker
    gflops: float
    threads: int

    def profile_of(self, node: LocalNode) -> NodeProfile:
        return NodeProfile(
            memory_bytes=node.memory_bytes, gflops=self.gflops * node.processor_share * node.speed,
            threads=self.threads, device=node.device,
            up_bytes_per_s=_LINE_BYTES_PER_S, down_bytes_per_s=_LINE_BYTES_PER_S, latency_s=0.0,
        )  # fmt: skip


class LocalNodes:
    """Agents of local nodes, as tasks of the coordinator's loop; each worker logs to `NAME.log` in the run's folder."""

    def __init__(self, nodes: Sequence[LocalNode], resources: _Resources) -> None:
        self._nodes, self._resources = nodes, resources
        self._running: dict[str, tuple[Agent, asyncio.Task[object]]] = {}
        self._group: asyncio.TaskGroup | None = None
        self.on_message: Callable[[str, bool], None] = lambda text, is_failure: None

    @property
    def sockets(self) -> Path:
        """The directory of the sockets by which nodes and coordinator connect."""
        return self._resources.sockets

    async def run(self) -> None:
        """Run all agents until cancelled; raises the first error that ends one."""
        async with asyncio.TaskGroup() as self._group:
            for node in self._nodes:
                self.add(node)
            await asyncio.Event().wait()  # even without any node: another may be added

    def add(self, node: LocalNode) -> None:
        """Start a node. Called in the coordinator's loop, which knows the name."""
        assert self._group is not None, "the nodes run"
        agent = self._agent(node)
        self._running[node.name] = agent, self._group.create_task(agent.run())

    def crash(self, name: str) -> None:
        """End a node without warning, as if its PC lost power. Called in the coordinator's loop."""
        agent, task = self._running.pop(name)
        agent.kill()
        task.cancel()

    def kill(self) -> None:
        """Kill all workers."""
        for agent, _ in list(self._running.values()):
            agent.kill()

    def _agent(self, node: LocalNode) -> Agent:
        resources = self._resources
        storage = NodeStorage(resources.directory / node.name, log=resources.folder / f"{node.name}.log")
        config = AgentConfig(
            release=__version__, home=storage, profile=resources.profile_of(node), core=node.core,
            processor_share=node.processor_share, spawn=resources.spawn,
        )  # fmt: skip
        return Agent(config, LocalMembership(node.name, self.sockets), _LocalConsole(node.name, self.on_message))


class _LocalConsole(AgentConsole):
    """Prints only that a local node's worker died or its stage failed; pages and `ravnest status` show its activity."""

    def __init__(self, name: str, on_message: Callable[[str, bool], None]) -> None:
        super().__init__(lambda line: None)
        self._name, self._on_message = name, on_message

    def worker_lost(self, reason: str, wait_s: float, log: Path) -> None:
        super().worker_lost(reason, wait_s, log)
        self._on_message(f"{self._name}: {reason}; starting another in {wait_s:.1f} s. Its log: {log}", False)

    def reported(self, report: StageReport) -> None:
        super().reported(report)
        if isinstance(report.report, StageFailed) and not report.report.is_consequence:
            self._on_message(f"{self._name} failed: {report.report.reason}", True)


def _as_before(plans: Sequence[PipelinePlan], job: TracedJob) -> tuple[list[PipelinePlan], list[str]]:
    """Return the plans with the cuts of the resumed run, where they match, and messages about the changes."""
    assert job.start is not None
    resumed = [plan_as_before(plan, job.program, job.start.manifest) for plan in plans]
    return [plan for plan, _ in resumed], list(dict.fromkeys(text for _, text in resumed))
