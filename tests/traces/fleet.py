"""A whole training in one process on a virtual clock: the real coordinator, simulated nodes, and a trace of faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.copying import CopyWishes
from ravnest.coordinator.decide import Wishes
from ravnest.coordinator.events import Event, NodeGone, RunBegun
from ravnest.coordinator.rounds import AveragingWishes
from ravnest.coordinator.state import State, apply, restore, snapshot
from ravnest.core.errors import FrameError
from ravnest.net.agree import Introduction
from ravnest.net.feeding import feed_purpose
from tests.traces.feed import Feed
from tests.traces.journal import Journal
from tests.traces.ledger import Ledger
from tests.traces.node import Node
from tests.traces.requester import Wanted
from tests.traces.stage import Stage
from tests.traces.world import World

NAMES = ("attic", "barn", "cellar", "den", "eaves", "foyer", "garage")
_START_S = 1000.0
GRACE_S = 3.0
_FAULTS_S = 40.0
_PATIENCE_S = 600.0


class _Coordinator(Coordinator):
    """On the loop's clock."""

    def now_s(self) -> float:
        return _START_S + asyncio.get_running_loop().time()


class Fleet:
    """Everything is drawn from the seed: how many nodes, what is wanted of them, and what befalls them."""

    def __init__(self, seed: int) -> None:
        self.seed, self.world, self.ledger = seed, World(seed), Ledger()
        self.loop, rng = self.world.loop, self.world.rng
        self._min_stages = rng.choice((1, 2, 2, 3))
        most = len(NAMES) if self._min_stages > 1 else 6  # in larger rings not everybody has a line to everybody
        self.nodes = {name: Node(self, name) for name in NAMES[: rng.randint(3, most)]}
        self.action_s = rng.choice((0.1, 0.3))
        self._rest_s, self._num_spares = rng.choice((5.0, 60.0)), rng.choice((0, 1))
        self.requester = Wanted(rng, steps=rng.choice((30, 60)), min_stages=self._min_stages)
        self.is_down = self.is_ending = False
        self.journal = Journal()
        self.faults: list[str] = []

    def run(self) -> None:
        try:
            self.loop.run_until_complete(self._run())
        finally:
            self.loop.close()

    def _wishes(self) -> Wishes:
        return Wishes(
            min_nodes=self._min_stages, min_stages=self._min_stages, wait_s=1.0, forming_s=20.0, blame_s=20.0,
            rest_s=self._rest_s, num_spares=self._num_spares,
        )  # fmt: skip

    async def _run(self) -> None:
        self._failed: asyncio.Future[None] = self.loop.create_future()
        self._main = asyncio.current_task()
        self.loop.set_exception_handler(self._went_wrong)
        self._open(State())
        self.coordinator.record(RunBegun(self.coordinator.now_s(), "run", self.requester.steps, "1"))
        for node in self.nodes.values():
            self.loop.call_later(self.world.rng.choice((0.0, 0.0, 5.0, 20.0)), node.start)
        self._plan_faults()
        self.loop.call_later(_FAULTS_S, self._all_well)
        await self._until(lambda: not self.is_down and len(self.requester.trained) == self.requester.steps, "training")
        self.is_ending = True
        self.coordinator.running.end_training()
        self.coordinator.average_for_the_last_time()
        await self._until(lambda: self.coordinator.averaging.is_settled, "the last averaging")
        self._close()

    def _open(self, state: State) -> None:
        def keep(event: Event) -> None:
            if self.coordinator.state is state and not self.is_down:  # else it comes from one that was killed
                self.journal.add(event, self.loop.time())
                self.ledger.check(state, event)

        self.coordinator = _Coordinator(
            state,
            self.requester,
            self._wishes(),
            averaging=AveragingWishes(average_every=8, grace_s=GRACE_S),
            copying=CopyWishes(every_s=5.0),
            keep=keep,
            clock=lambda: _START_S,
        )
        self._tending = self.loop.create_task(self.coordinator.tend())
        self._tending.add_done_callback(self._tended)

    def _close(self) -> None:
        self._tending.cancel()

    # the coordinator itself

    def _restart(self, node: Node) -> None:
        """Killed, and started again from its journal, which lacks the leases of the last moment."""
        if self.is_down or self.is_ending:
            return
        self.is_down = True
        for task in asyncio.all_tasks(self.loop) - {self._main}:
            task.cancel()
        for one in self.nodes.values():
            one.coordinator_died()
        for live in self.coordinator.running.clusters.values():
            live.close()  # also towards those who stand still, and do not see it yet
        self.loop.call_later(self._again_s(), self._take_up)

    def _take_up(self) -> None:
        events = self.journal.cut_back()
        state, self.ledger = State(), Ledger(owners=self.ledger.owners, kinds=self.ledger.kinds)
        for event in events:
            apply(state, event)
            self.ledger.check(state, event)
        assert restore(snapshot(state)) == state
        self.requester.trained = {batch for batch in range(self.requester.steps) if state.leases.is_settled(batch)}
        self.is_down = False
        self._open(state)
        for name in [name for name, node in state.nodes.items() if node.is_present]:
            self.coordinator.record(NodeGone(self.coordinator.now_s(), name, "the coordinator was started anew", True))
        self.coordinator.take_up()

    def dial_feed(self, stage: Stage) -> Feed | None:
        """None if the coordinator does not know this root."""
        part = stage.part
        try:
            live = self.coordinator.running.feed_for(
                stage.being.name, Introduction.of(part.generation, feed_purpose(part.cluster))
            )
        except FrameError:
            return None
        feed = Feed(stage, live)
        live.attached(feed)
        return feed

    # what befalls them

    def _plan_faults(self) -> None:
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
        self.world.cut(pair, "the line is cut", 6.0)
        self.loop.call_later(self._again_s(), self.world.cuts.discard, pair)

    def _be_slow(self, node: Node) -> None:
        node.ready_s = 100.0
        self.loop.call_later(self._again_s(), setattr, node, "ready_s", 0.5)

    def _all_well(self) -> None:
        """From now on enough nodes are there for long enough."""
        self.world.cuts.clear()
        for node in self.nodes.values():
            node.is_cut_off, node.ready_s = False, 0.5
            node.thaw()
            node.start()

    # watching

    async def _until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = self.loop.time() + _FAULTS_S + _PATIENCE_S
        while not is_so():
            if self._failed.done():
                self._failed.result()
            words = "\n".join(f"{at_s - _START_S:7.2f} {text}" for at_s, text in self.coordinator.state.words)
            assert self.loop.time() < end_s, f"{what} hangs; {self.faults}\n{words}"
            await asyncio.sleep(0.5)

    def _tended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _went_wrong(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException) and not self._failed.done():
            self._failed.set_exception(error)
