"""A whole training in one process on a virtual clock: the real coordinator, simulated nodes, and a trace of faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ravnest.coordinator.apply import apply, restore, snapshot
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.events import Event, NodeLost, RunStarted
from ravnest.coordinator.policy.averaging import AveragingPolicy
from ravnest.coordinator.policy.membership import MembershipPolicy
from ravnest.coordinator.policy.replication import ReplicationPolicy
from ravnest.coordinator.state import CoordinatorState
from ravnest.errors import FrameError
from ravnest.protocol.pipeline import feed_purpose
from ravnest.transport.introduction import Introduction
from tests.simulation.feed import Feed
from tests.simulation.journal import Journal
from tests.simulation.ledger import Ledger
from tests.simulation.node import Node
from tests.simulation.requester import SimulatedRequester
from tests.simulation.stage import Stage
from tests.simulation.world import World

NAMES = ("attic", "barn", "cellar", "den", "eaves", "foyer", "garage")
_START_S = 1000.0
GRACE_S = 3.0
_FAULTS_S = 40.0
_TIMEOUT_S = 600.0


class _Coordinator(Coordinator):
    """On the loop's clock."""

    def now_s(self) -> float:
        return _START_S + asyncio.get_running_loop().time()


class Fleet:
    """Everything is drawn from the seed: the nodes, the job and the faults."""

    def __init__(self, seed: int) -> None:
        self.seed, self.world, self.ledger = seed, World(seed), Ledger()
        self.loop, rng = self.world.loop, self.world.rng
        self._min_stages = rng.choice((1, 2, 2, 3))
        most = len(NAMES) if self._min_stages > 1 else 6  # larger rings are not fully linked
        self.nodes = {name: Node(self, name) for name in NAMES[: rng.randint(3, most)]}
        self.action_s = rng.choice((0.1, 0.3))
        self._rest_s, self._num_spares = rng.choice((5.0, 60.0)), rng.choice((0, 1))
        self.requester = SimulatedRequester(rng, steps=rng.choice((30, 60)), min_stages=self._min_stages)
        self.is_down = self.is_ending = False
        self.journal = Journal()
        self.faults: list[str] = []

    def run(self) -> None:
        try:
            self.loop.run_until_complete(self._run())
        finally:
            self.loop.close()

    def _policy(self) -> MembershipPolicy:
        return MembershipPolicy(
            min_nodes=self._min_stages, min_stages=self._min_stages, settle_s=1.0, forming_timeout_s=20.0,
            quarantine_s=20.0, replan_interval_s=self._rest_s, num_spares=self._num_spares,
        )  # fmt: skip

    async def _run(self) -> None:
        self._failed: asyncio.Future[None] = self.loop.create_future()
        self._main = asyncio.current_task()
        self.loop.set_exception_handler(self._loop_failed)
        self._open(CoordinatorState())
        self.coordinator.record(RunStarted(self.coordinator.now_s(), "run", self.requester.steps, "1"))
        for node in self.nodes.values():
            self.loop.call_later(self.world.rng.choice((0.0, 0.0, 5.0, 20.0)), node.start)
        self._schedule_faults()
        self.loop.call_later(_FAULTS_S, self._repair_all)
        await self._until(lambda: not self.is_down and len(self.requester.trained) == self.requester.steps, "training")
        self.is_ending = True
        self.coordinator.running.end_training()
        self.coordinator.start_final_averaging()
        await self._until(lambda: self.coordinator.averaging.is_settled, "the last averaging")
        self._close()

    def _open(self, state: CoordinatorState) -> None:
        def keep(event: Event) -> None:
            if self.coordinator.state is state and not self.is_down:  # else it comes from a killed coordinator
                self.journal.add(event, self.loop.time())
                self.ledger.check(state, event)

        self.coordinator = _Coordinator(
            state,
            self.requester,
            self._policy(),
            averaging=AveragingPolicy(average_every=8, grace_s=GRACE_S),
            replication=ReplicationPolicy(interval_s=5.0),
            persist=keep,
            clock=lambda: _START_S,
        )
        self._run_task = self.loop.create_task(self.coordinator.run())
        self._run_task.add_done_callback(self._run_done)

    def _close(self) -> None:
        self._run_task.cancel()

    # the coordinator itself

    def _restart(self, node: Node) -> None:
        """Kill the coordinator and restart it from its journal, which lacks the latest leases."""
        if self.is_down or self.is_ending:
            return
        self.is_down = True
        for task in asyncio.all_tasks(self.loop) - {self._main}:
            task.cancel()
        for one in self.nodes.values():
            one.coordinator_died()
        for live in self.coordinator.running.clusters.values():
            live.close()  # also for frozen nodes, which do not notice yet
        self.loop.call_later(self._again_s(), self._resume)

    def _resume(self) -> None:
        events = self.journal.truncate()
        state, self.ledger = CoordinatorState(), Ledger(owners=self.ledger.owners, kinds=self.ledger.kinds)
        for event in events:
            apply(state, event)
            self.ledger.check(state, event)
        assert restore(snapshot(state)) == state
        self.requester.trained = {batch for batch in range(self.requester.steps) if state.leases.is_settled(batch)}
        self.is_down = False
        away_s = _START_S + self.loop.time() - state.last_event_s
        self._open(state)
        for name in [name for name, node in state.nodes.items() if node.is_present]:
            self.coordinator.record(NodeLost(self.coordinator.now_s(), name, "the coordinator was restarted", True))
        self.coordinator.resume(away_s)

    def dial_feed(self, stage: Stage) -> Feed | None:
        """None if the coordinator rejects it."""
        assignment = stage.assignment
        try:
            live = self.coordinator.running.feed_for(
                stage.host.name, Introduction.of(assignment.generation, feed_purpose(assignment.cluster))
            )
        except FrameError:
            return None
        feed = Feed(stage, live)
        live.attached(feed)
        return feed

    # faults

    def _schedule_faults(self) -> None:
        rng = self.world.rng
        for _ in range(rng.randint(1, 10)):
            at_s = rng.uniform(2.0, _FAULTS_S)
            name = rng.choice(list(self.nodes))
            kinds: tuple[tuple[str, Callable[[Node], None]], ...] = (
                ("kill", self._kill), ("freeze", self._freeze), ("leave", self._leave), ("cut off", self._cut_off),
                ("cut", self._cut), ("lose worker", Node.lose_worker), ("be slow", self._be_slow),
                ("restart", self._restart),
            )  # fmt: skip
            kind, do = rng.choice(kinds)
            self.faults.append(f"{at_s:.1f} {kind} {name}")
            self.loop.call_later(at_s, do, self.nodes[name])

    def _again_s(self) -> float:
        return self.world.rng.choice((0.5, 5.0, 30.0))

    def _kill(self, node: Node) -> None:
        node.kill()
        self.loop.call_later(self._again_s(), node.start)

    def _leave(self, node: Node) -> None:
        node.leave()
        self.loop.call_later(self._again_s(), node.start)

    def _freeze(self, node: Node) -> None:
        node.freeze()
        self.loop.call_later(self._again_s(), node.thaw)

    def _cut_off(self, node: Node) -> None:
        node.cut_off()
        self.loop.call_later(self._again_s(), setattr, node, "is_cut_off", False)

    def _cut(self, node: Node) -> None:
        pair = frozenset({node.name, self.world.rng.choice([name for name in self.nodes if name != node.name])})
        self.world.cuts.add(pair)
        self.world.cut(pair, "the link failed", 6.0)
        self.loop.call_later(self._again_s(), self.world.cuts.discard, pair)

    def _be_slow(self, node: Node) -> None:
        node.ready_s = 100.0
        self.loop.call_later(self._again_s(), setattr, node, "ready_s", 0.5)

    def _repair_all(self) -> None:
        """End all faults: from now on all nodes are available."""
        self.world.cuts.clear()
        for node in self.nodes.values():
            node.is_cut_off, node.ready_s = False, 0.5
            node.thaw()
            node.start()

    # progress

    async def _until(self, predicate: Callable[[], bool], what: str) -> None:
        end_s = self.loop.time() + _FAULTS_S + _TIMEOUT_S
        while not predicate():
            if self._failed.done():
                self._failed.result()
            words = "\n".join(f"{at_s - _START_S:7.2f} {text}" for at_s, text in self.coordinator.state.recent_events)
            assert self.loop.time() < end_s, f"{what} hangs; {self.faults}\n{words}"
            await asyncio.sleep(0.5)

    def _run_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException) and not self._failed.done():
            self._failed.set_exception(error)
