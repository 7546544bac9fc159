"""The agent of a node: joins a run, supervises a worker process, and reconciles it with the desired assignment.

    membership -> profile -> worker with open endpoints -> Hello -> DesiredAssignment, DesiredAssignment, ...

The session with the coordinator may break at any moment; it is reopened with backoff, for as long as the owner allows,
and the worker and its links keep running meanwhile. A worker that dies is restarted. The agent ends with the run.

The agent offers its share of the PC (`offer`), which changes when other agents of the PC come or go; the line to the
coordinator is measured while the worker starts. The agent itself never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ravnest.core.clock import Backoff, Deadline
from ravnest.core.config import config, require
from ravnest.core.units import format_bytes, format_seconds
from ravnest.errors import LinkError, RavnestError, RequestRejected
from ravnest.node.client import Client
from ravnest.node.console import AgentConsole, joined, thanks
from ravnest.node.host_share import Share
from ravnest.node.measurement import with_line
from ravnest.node.membership import Membership
from ravnest.node.offer import PcOffer, describe_share
from ravnest.node.reconciler import Reconciler
from ravnest.node.session import DisconnectedByCoordinator, Outbox, run_session
from ravnest.node.storage import NodeStorage, host_directory
from ravnest.node.worker_process import SpawnWorker, spawn_worker
from ravnest.node.worker_supervisor import WorkerSupervisor
from ravnest.profiling.limits import MachineLimits
from ravnest.protocol.commands import StageFailed, StageReady
from ravnest.protocol.control import (
    AddressChanged,
    AssignmentReleased,
    DesiredAssignment,
    FromCoordinator,
    Hello,
    LeaveRequest,
    NodeProfile,
    NodeWork,
    ProfileChanged,
    ReplicaStored,
    SendReplica,
    StageCommand,
    StageReport,
    StoreReplica,
    Waiting,
    Welcome,
    reconnect_interval_s,
)
from ravnest.protocol.worker import EndpointOpened, StageReleased, StartWorker, WorkerUnable

__all__ = ["Agent", "AgentConfig", "CoordinatorAway", "Farewell"]

_LEAVE_S = 3.0  # for the coordinator to answer; a second Ctrl-C does not wait for it
_MAX_LEAVE_S = 60.0
_OBSERVED_S = 3.0
_SHARE_S = 1.0  # between two looks at the other agents of this PC
_NOT_A_MEMBER = (401, 403)
_LESS_MEMORY = 0.8  # of what a stage had in use when it ran out of memory


@config
class AgentConfig:
    """Settings of the PC's owner."""

    release: str
    home: NodeStorage
    port: int = 0
    memory_bytes: int | None = None
    threads: int | None = None
    device: str = "auto"
    max_upload_bytes_per_s: float | None = None
    profile: NodeProfile | None = None  # None: this PC is measured first
    core: int = -1
    processor_share: float = 1.0  # of a core: the worker pauses while it has used more
    spawn: SpawnWorker = spawn_worker
    max_wait_s: float | None = None  # for a coordinator that does not answer; None: without end
    stays: bool = False  # after the end of a run, for the next one
    page: Callable[[str], str] = lambda name: ""  # a line about the page of the node of this name

    def __post_init__(self) -> None:
        require(0 <= self.port < 2**16, f"port must be 1 to 65535, or 0 for any, got {self.port}")
        require(0 < self.processor_share <= 1, f"processor_share must be > 0 and <= 1, got {self.processor_share}")


@dataclass(frozen=True)
class Farewell:
    """The end of a node's part in a run: the coordinator's reason, and what the node contributed."""

    reason: str
    is_run_over: bool
    contribution: NodeWork | None


class CoordinatorAway(RavnestError):
    """The coordinator has not answered for as long as the owner wants to wait."""


class Agent:
    """The agent of one node. Create it in a running asyncio loop, `run` it, and end it with `leave`."""

    def __init__(self, config: AgentConfig, membership: Membership, console: AgentConsole) -> None:
        self._config, self._membership, self._console = config, membership, console
        self._outbox = Outbox()
        self._supervisor = WorkerSupervisor(config.spawn, config.home.log, self._handle_worker, self._worker_lost)
        self._reconciler = Reconciler(
            config.home, membership.connect, self._supervisor.send, self._report, self._supervisor.is_ready
        )
        self._offer: PcOffer | None = None
        if config.profile is None:
            limits = MachineLimits(memory_bytes=config.memory_bytes, threads=config.threads)
            self._offer = PcOffer(limits, config.home.directory.parent, host_directory(), device=config.device)
        self._leaving = asyncio.Event()
        self._unable: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._profile: NodeProfile | None = None
        self._is_line_measured = not membership.identity
        self._is_welcome = False
        self._most_bytes: int | None = None  # that this node offers, since a stage ran out of memory
        self._leave_deadline = Deadline(0.0)
        self._farewell: Farewell | None = None

    async def run(self) -> Farewell | None:
        """Run until the run ends or `leave` is called; returns the coordinator's farewell, if it sent one.

        Raises:
            DisconnectedByCoordinator: The coordinator has removed this node.
            CoordinatorAway: The coordinator has not answered for `max_wait_s`.
        """
        with self._config.home.held(), self._offer.claimed() if self._offer is not None else contextlib.nullcontext():
            work = asyncio.create_task(self._work())
            leaving = asyncio.create_task(self._leaving.wait())
            try:
                done, _ = await asyncio.wait((work, leaving, self._unable), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if self._is_welcome and self._leaving.is_set():
                    self._outbox.put(LeaveRequest("its owner ended it"))
                    self._leave_deadline = Deadline(_LEAVE_S)
                    while not work.done() and not self._leave_deadline.passed():  # the coordinator's answer ends it
                        await asyncio.wait((work,), timeout=self._leave_deadline.left_s())
            finally:
                work.cancel()
                leaving.cancel()
                await asyncio.gather(work, leaving, return_exceptions=True)
                await self._reconciler.close()
                await self._supervisor.stop()
        return self._farewell

    def leave(self) -> None:
        """Leave the run; the coordinator says how long others need to take over the stage."""
        self._console.log(f"leaving{'; press Ctrl-C again to leave at once' if self._reconciler.holding else ''}")
        self._leaving.set()

    def kill(self) -> None:
        """Kill the worker; the next start removes its files."""
        self._supervisor.kill()

    async def _work(self) -> None:
        config, membership = self._config, self._membership
        try:
            async with asyncio.timeout(config.max_wait_s):
                await membership.join(self._console.log)
        except TimeoutError:
            raise self._away("the coordinator does not answer") from None
        profile = config.profile or await self._measure()
        self._profile, self._reconciler.max_weights_bytes = profile, profile.memory_bytes
        sockets, host = membership.sockets
        self._supervisor.start(
            StartWorker(
                name=membership.name,
                profile=profile,
                replica_directory=str(config.home.replica_store.directory),
                identity=membership.identity,
                coordinator=membership.coordinator,
                socket_directory="" if sockets is None else str(sockets),
                host=host,
                port=config.port or config.home.port,
                is_port_fixed=config.port != 0,
                max_upload_bytes_per_s=config.max_upload_bytes_per_s,
                core=config.core,
                processor_share=config.processor_share,
            )
        )
        await asyncio.gather(self._supervisor.is_ready.wait(), self._measure_line())
        await self._supervisor.wait_observed(_OBSERVED_S if membership.identity else 0.0)
        watching = asyncio.create_task(self._watch_share())
        try:
            await self._stay_connected()
        finally:
            watching.cancel()

    async def _measure(self) -> NodeProfile:
        assert self._offer is not None, "without a given profile there is an offer"
        return await self._offer.measure(self._console.log)

    async def _measure_line(self) -> None:
        """Measure the line to the coordinator, once; a connection that fails is reported by the session."""
        if self._is_line_measured:
            return
        assert self._profile is not None, "the PC was measured before"
        self._console.log("measuring the line to the coordinator")
        with contextlib.suppress(LinkError, RequestRejected):
            async with self._membership.connect() as client:
                self._profile = await with_line(self._profile, client, self._config.max_upload_bytes_per_s)
                self._is_line_measured = True

    async def _watch_share(self) -> None:
        """Adapt the offer when other agents of this PC come or go."""
        while self._offer is not None:
            if (found := self._offer.changed()) is not None:
                self._change_offer(*found)
            await asyncio.sleep(_SHARE_S)

    def _change_offer(self, offered: NodeProfile, share: Share) -> None:
        before = self._profile
        assert before is not None, "the PC was measured before"
        memory_bytes = min(offered.memory_bytes, self._most_bytes or offered.memory_bytes)
        self._profile = msgspec.structs.replace(
            before, memory_bytes=memory_bytes, gflops=offered.gflops, threads=offered.threads,
            host_memory_bytes=offered.host_memory_bytes,
        )  # fmt: skip
        self._reconciler.max_weights_bytes = memory_bytes
        self._supervisor.set_profile(self._profile)
        if (offered.threads, memory_bytes) != (before.threads, before.memory_bytes):  # else its speed alone
            self._console.note(describe_share(share))
        if self._is_welcome:  # otherwise the hello carries it
            self._outbox.put(ProfileChanged(self._profile))

    async def _stay_connected(self) -> None:
        backoff, failures, max_wait_s = Backoff(), 0, self._config.max_wait_s
        limit = "" if max_wait_s is None else f" for up to {format_seconds(max_wait_s)}"
        away = None if max_wait_s is None else Deadline(max_wait_s)
        lost_s = time.monotonic()
        while (problem := await self._try_session()) is not None:
            if self._is_welcome:  # the session worked: this is a first failure
                self._is_welcome, failures, lost_s = False, 0, time.monotonic()
                backoff.reset()
                if away is not None:
                    away.restart()
            else:
                self._membership.try_next_address()
                failures += 1
            if failures % self._membership.num_addresses == 0:  # all of them have been tried
                if away is not None and away.passed():
                    raise self._away(problem)
                training = ", training continues" if self._reconciler.holding else ""
                self._console.log(f"{problem}; retrying{limit}{training}")
                await asyncio.sleep(min(backoff.next_s(), reconnect_interval_s(time.monotonic() - lost_s)))

    def _away(self, problem: str) -> CoordinatorAway:
        assert self._config.max_wait_s is not None
        waited = format_seconds(self._config.max_wait_s)
        return CoordinatorAway(f"{problem}, for {waited} now: join again if the run continues")

    async def _try_session(self) -> str | None:
        """Return why the session ended, if it may be opened again; None when the node has left."""
        try:
            async with self._membership.connect() as client:
                await self._run_session(client)
            return None
        except DisconnectedByCoordinator as error:
            if self._leaving.is_set() or error.is_run_over:
                return self._end_run(error)
            if not error.may_reconnect:
                raise
            return f"disconnected by the coordinator: {error}"
        except RequestRejected as error:
            if error.status in _NOT_A_MEMBER:
                raise DisconnectedByCoordinator(
                    f"no longer a member of the run: {error}", may_reconnect=False
                ) from error
            return str(error)
        except LinkError as error:
            return None if self._leaving.is_set() else str(error)

    def _end_run(self, error: DisconnectedByCoordinator) -> str | None:
        """Return why to connect again after the end of a run, or of this node's part in it."""
        farewell = Farewell(str(error), error.is_run_over, error.contribution)
        if self._leaving.is_set() or not self._config.stays:
            self._farewell = farewell
            return None
        if self._is_welcome:  # else this run's end has been said
            self._console.log(thanks(farewell.contribution))
        return "waiting for the next run with this ticket"

    async def _run_session(self, client: Client) -> None:
        supervisor = self._supervisor
        assert self._profile is not None, "the PC was measured before"
        await self._measure_line()
        hello = Hello(
            release=self._config.release,
            profile=self._profile,
            addresses=supervisor.addresses,
            held_generation=self._reconciler.holding,
            replicas=self._config.home.replica_store.replicas(),
        )
        await run_session(client, hello, self._outbox, self._handle_coordinator, lambda: self._console.activity)

    def _handle_coordinator(self, message: FromCoordinator) -> None:
        match message:
            case Welcome(run=run):
                self._config.home.set_run(run)
                assert self._profile is not None, "a hello was sent before"
                self._is_welcome = True
                self._console.log(joined(self._membership.name, self._profile))
                if line := self._config.page(self._membership.name):
                    self._console.note(line)
            case DesiredAssignment(assignment=assignment, reason=reason):
                if self._reconciler.set_target(assignment):
                    self._console.assigned(assignment, reason)
            case StageCommand(generation=generation, command=command):
                self._reconciler.command(generation, command)
            case SendReplica() | StoreReplica():
                self._supervisor.send(message)
            case Waiting(reason=reason, within_s=within_s):
                self._console.waiting(reason, within_s)
                if self._leaving.is_set() and within_s is not None:
                    self._leave_deadline = Deadline(min(max(within_s, 0.0), _MAX_LEAVE_S) + _LEAVE_S)

    def _handle_worker(
        self, message: EndpointOpened | AddressChanged | StageReport | StageReleased | ReplicaStored | WorkerUnable
    ) -> None:
        match message:
            case EndpointOpened(port=port):
                self._config.home.port = port
            case AddressChanged():
                if self._is_welcome:  # otherwise the hello carries it
                    self._outbox.put(message)
            case StageReport():
                self._reconciler.stage_reported(message)
            case StageReleased(generation=generation, replica=replica):
                self._reconciler.stage_released(generation, replica)
            case ReplicaStored():
                self._outbox.put(message)
            case WorkerUnable(reason=reason):
                if not self._unable.done():
                    self._unable.set_exception(RavnestError(reason))

    def _worker_lost(self, reason: str, wait_s: float) -> None:
        self._reconciler.worker_lost(reason)
        self._console.worker_lost(reason, wait_s, self._config.home.log)

    def _report(self, report: StageReport | AssignmentReleased) -> None:
        if isinstance(report, StageReport):
            if isinstance(report.report, StageReady):
                self._supervisor.reset_backoff()
            self._console.reported(report)
            if isinstance(report.report, StageFailed) and report.report.exhausted_bytes:
                self._offer_less(report.report.exhausted_bytes)
        self._outbox.put(report)

    def _offer_less(self, exhausted_bytes: int) -> None:
        """Offer less memory than a stage ran out of; the coordinator is told before it is told of the failure."""
        profile = self._profile
        assert profile is not None, "the PC was measured before"
        self._most_bytes = max(1, int(_LESS_MEMORY * min(profile.memory_bytes, exhausted_bytes)))
        self._profile = msgspec.structs.replace(profile, memory_bytes=self._most_bytes)
        self._supervisor.set_profile(self._profile)
        self._console.note(f"a stage ran out of memory: offering {format_bytes(self._most_bytes)} from now on")
        if self._is_welcome:  # otherwise the hello carries it
            self._outbox.put(ProfileChanged(self._profile))
