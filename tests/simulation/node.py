"""A simulated node: an agent with its session, reconciliation and reconnects, and the stage it holds.

To a coordinator it behaves like `node.agent`, `node.reconciler` and the worker: messages in transit are lost when a
session ends, unsent ones are sent in the next session.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ravnest.protocol.commands import Command, StageFailed
from ravnest.protocol.control import (
    MAX_REPLICAS,
    Assignment,
    AssignmentReleased,
    DesiredAssignment,
    Disconnect,
    FromCoordinator,
    FromNode,
    Heartbeat,
    Hello,
    LeaveRequest,
    NodeProfile,
    ReplicaInfo,
    ReplicaStored,
    SendReplica,
    StageCommand,
    StageReport,
    StoreReplica,
    Welcome,
)
from ravnest.protocol.peer import PeerAddresses
from tests.simulation.replicas import Transfer
from tests.simulation.session import SimulatedSession
from tests.simulation.stage import Stage

if TYPE_CHECKING:
    from tests.simulation.fleet import Fleet

PROFILE = NodeProfile(memory_bytes=8_000_000_000, gflops=40.0)
_RECONNECT_S = (0.2, 1.0, 3.0)


class Node:
    """One PC. `life` counts its processes: actions of an earlier process are dropped."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name, self.rng = fleet, name, random.Random(f"{fleet.seed} {name}")
        self.life = 0
        self.is_alive = self.is_frozen = self.is_cut_off = False
        self.replicas: dict[tuple[str, int], int] = {}
        self.ready_s = self.rng.choice((0.1, 0.5, 2.0))
        self._deferred: deque[tuple[int, Callable[[], None]]] = deque()
        self._reset()

    def _reset(self) -> None:
        """The state of a process."""
        self._session: SimulatedSession | None = None
        self.outbox: deque[FromNode] = deque()
        self._target: Assignment | None = None
        self._early: list[Command] = []
        self.stage: Stage | None = None
        self._is_releasing = False

    # process

    def do(self, what: Callable[[], None]) -> None:
        if self.is_frozen:
            self._deferred.append((self.life, what))
        elif self.is_alive:
            what()

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.fleet.loop.call_later(delay_s, self._in_life, self.life, what)

    def _in_life(self, life: int, what: Callable[[], None]) -> None:
        if life == self.life:
            self.do(what)

    def start(self) -> None:
        if not self.is_alive:
            self.is_alive, self.life = True, self.life + 1
            self._reset()
            self.later(self.rng.uniform(0.0, 1.0), self._connect)

    def kill(self) -> None:
        """End the process and its links; stored replicas stay."""
        if self.is_alive:
            self.is_alive = self.is_frozen = False
            self._deferred.clear()
            self.fleet.world.cut(frozenset({self.name}), "it died", 0.5)
            self._hang_up()
            self.stage = None

    def leave(self) -> None:
        """In good order, as by Ctrl-C."""
        if self.is_alive and self._session is not None:
            self.send(LeaveRequest("its owner ended it"))
            self.later(0.3, self.kill)

    def freeze(self) -> None:
        self.is_frozen = self.is_alive

    def thaw(self) -> None:
        self.is_frozen = False
        waiting, self._deferred = self._deferred, deque()
        for life, what in waiting:
            if life == self.life and self.is_alive:
                what()

    def lose_worker(self) -> None:
        """The child process that computes dies; the agent lives."""
        if self.stage is not None and not self.is_frozen:
            generation, self.stage = self.stage.assignment.generation, None
            self.fleet.world.cut(frozenset({self.name}), "its worker died", 0.5)
            self.send(StageReport(generation, StageFailed("the worker ended with code -9")))
            self.send(AssignmentReleased(generation))

    def cut_off(self) -> None:
        """Lose the connection to the coordinator only."""
        self.is_cut_off = True
        self._hang_up(notice_s=6.0)
        if self.stage is not None:
            self.stage.feed_lost("the connection to the coordinator failed")

    def coordinator_died(self) -> None:
        """The stage continues with the microbatches it has."""
        self._hang_up()
        if self.stage is not None:
            self.stage.feed_lost("the coordinator is gone")

    def _hang_up(self, notice_s: float = 0.5) -> None:
        if self._session is not None:
            self._session.cut("the connection ended", notice_s)

    # session

    def _connect(self) -> None:
        if self._session is not None:
            return
        if self.fleet.is_down or self.is_cut_off:
            self.later(self.rng.choice(_RECONNECT_S), self._connect)
            return
        holding = self.stage.assignment.generation if self.stage is not None else 0
        replicas = tuple(ReplicaInfo(cluster, stage, updates) for (cluster, stage), updates in self.replicas.items())
        self._session = SimulatedSession(self.fleet, self, self.fleet.coordinator)
        self._session.send_from_node(
            Hello(
                release="1",
                profile=PROFILE,
                addresses=PeerAddresses((("10.0.0.1", 9),)),
                held_generation=holding,
                replicas=replicas,
            )
        )

    def session_ended(self, session: SimulatedSession, *, may_reconnect: bool = True) -> None:
        if self._session is session:
            self._session = None
            if may_reconnect:
                self.later(self.rng.choice(_RECONNECT_S), self._connect)

    def send(self, message: FromNode) -> None:
        self.outbox.append(message)
        if self._session is not None:
            self._session.send_queued()

    def _send_heartbeats(self, session: SimulatedSession, heartbeat_s: float) -> None:
        if self._session is session:
            self.send(Heartbeat())
            self.later(heartbeat_s, lambda: self._send_heartbeats(session, heartbeat_s))

    def receive(self, session: SimulatedSession, message: FromCoordinator) -> None:
        if self._session is not session:
            return
        match message:
            case Welcome(heartbeat_s=heartbeat_s):
                session.is_welcome = True
                session.send_queued()
                self._send_heartbeats(session, heartbeat_s)
            case DesiredAssignment(assignment=assignment):
                self._set_target(assignment)
            case StageCommand(generation=generation, command=order):
                self._order(generation, order)
            case SendReplica(transfer=number, replica=replica):
                Transfer(self, number).give(replica)
            case StoreReplica(transfer=number, replica=replica):
                Transfer(self, number).take(lambda updates: self._keep(number, replica, updates))
            case Disconnect(may_reconnect=may_reconnect):
                self.session_ended(session, may_reconnect=may_reconnect)
                if not may_reconnect:
                    self.kill()

    # assignment

    def _set_target(self, assignment: Assignment | None) -> None:
        before = 0 if self._target is None else self._target.generation
        if before == (0 if assignment is None else assignment.generation):
            return
        if assignment is not None:
            self.fleet.ledger.assigned(self.name, assignment)
        self._target = assignment
        self._early.clear()
        if self.stage is not None:
            self.stage.end()
        elif not self._is_releasing:
            self._start_stage()

    def _start_stage(self) -> None:
        assignment = self._target
        if assignment is not None:
            self.stage = Stage(self, assignment)
            for order in self._early:
                self.stage.order(order)
        self._early.clear()

    def _order(self, generation: int, order: Command) -> None:
        """An order that arrives before its assignment waits for it."""
        if self._target is None or self._target.generation != generation:
            return
        if self.stage is not None and self.stage.assignment.generation == generation:
            self.stage.order(order)
        else:
            self._early.append(order)

    def stage_over(self, stage: Stage, failure: StageFailed | None) -> None:
        """Its links are closed; storing its state takes a moment."""
        self.stage, self._is_releasing = None, True
        generation, updates = stage.assignment.generation, stage.updates
        if failure is not None:
            self.send(StageReport(generation, failure))

        def release() -> None:
            self._is_releasing = False
            replica = (
                ReplicaInfo(stage.assignment.cluster, stage.assignment.stage, updates)
                if stage.has_run and updates
                else None
            )
            if replica is not None:
                self._store_replica(replica)
            self.send(AssignmentReleased(generation, replica))
            if self._target is not None and self._target.generation != generation:
                self._start_stage()

        self.later(self.rng.choice((0.01, 0.3, 2.0)), release)

    def _keep(self, number: int, replica: ReplicaInfo, updates: int | None) -> None:
        if updates is None:
            self.send(ReplicaStored(number, reason="the transfer failed"))
            return
        kept = ReplicaInfo(replica.cluster, replica.stage, updates)
        self._store_replica(kept)
        self.send(ReplicaStored(number, kept, 1000))

    def _store_replica(self, replica: ReplicaInfo) -> None:
        """Drop the oldest beyond the limit."""
        key = replica.cluster, replica.stage
        self.replicas = {**{k: v for k, v in self.replicas.items() if k != key}, key: replica.updates}
        self.replicas = dict(list(self.replicas.items())[-MAX_REPLICAS:])

    def report(self, generation: int, report: Any) -> None:
        self.send(StageReport(generation, report))
