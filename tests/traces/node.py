"""A simulated node: an agent that converses, converges and reconnects, and the stage that it holds.

It does what `node.agent`, `node.convergence` and `node.station` do, as far as a coordinator can tell: what was on its
way when a conversation breaks is lost, what had not been said is said in the next.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ravnest.core.control import (
    MOST_COPIES,
    Beat,
    Copied,
    Copy,
    Desired,
    Give,
    Goodbye,
    Hello,
    Keep,
    Leave,
    LetGo,
    NodeProfile,
    Part,
    Report,
    Said,
    Tell,
    Told,
    Welcome,
    Whereabouts,
)
from ravnest.core.orders import Failed, Order
from tests.traces.conversation import Conversation
from tests.traces.copies import Transfer
from tests.traces.stage import Stage

if TYPE_CHECKING:
    from tests.traces.fleet import Fleet

PROFILE = NodeProfile(memory_bytes=8_000_000_000, gflops=40.0)
_RECONNECT_S = (0.2, 1.0, 3.0)


class Node:
    """One PC. `life` counts its processes: what was begun in an earlier life does not happen any more."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet, self.name, self.rng = fleet, name, random.Random(f"{fleet.seed} {name}")
        self.life = 0
        self.is_alive = self.is_frozen = self.is_cut_off = False
        self.shelf: dict[tuple[str, int], int] = {}
        self.ready_s = self.rng.choice((0.1, 0.5, 2.0))
        self._kept_waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._forget()

    def _forget(self) -> None:
        """All that a process knows."""
        self._conversation: Conversation | None = None
        self.outbox: deque[Said] = deque()
        self._desired: Part | None = None
        self._early: list[Order] = []
        self.stage: Stage | None = None
        self._is_letting_go = False

    # being

    def do(self, what: Callable[[], None]) -> None:
        if self.is_frozen:
            self._kept_waiting.append((self.life, what))
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
            self._forget()
            self.later(self.rng.uniform(0.0, 1.0), self._connect)

    def kill(self) -> None:
        """Process and lines at once; what is on the shelf stays."""
        if self.is_alive:
            self.is_alive = self.is_frozen = False
            self._kept_waiting.clear()
            self.fleet.world.cut(frozenset({self.name}), "it died", 0.5)
            self._hang_up()
            self.stage = None

    def leave(self) -> None:
        """In good order, as by Ctrl-C."""
        if self.is_alive and self._conversation is not None:
            self.say(Leave("its owner ended it"))
            self.later(0.3, self.kill)

    def freeze(self) -> None:
        self.is_frozen = self.is_alive

    def thaw(self) -> None:
        self.is_frozen = False
        waiting, self._kept_waiting = self._kept_waiting, deque()
        for life, what in waiting:
            if life == self.life and self.is_alive:
                what()

    def lose_worker(self) -> None:
        """The child process that computes dies; the agent lives."""
        if self.stage is not None and not self.is_frozen:
            generation, self.stage = self.stage.part.generation, None
            self.fleet.world.cut(frozenset({self.name}), "its worker died", 0.5)
            self.say(Report(generation, Failed("the worker ended with code -9")))
            self.say(LetGo(generation))

    def cut_off(self) -> None:
        """Its line to the coordinator is gone, and nothing else."""
        self.is_cut_off = True
        self._hang_up(notice_s=6.0)
        if self.stage is not None:
            self.stage.feed_lost("its line to the coordinator is gone")

    def coordinator_died(self) -> None:
        """The stage trains on for as long as it has something to train."""
        self._hang_up()
        if self.stage is not None:
            self.stage.feed_lost("the coordinator is gone")

    def _hang_up(self, notice_s: float = 0.5) -> None:
        if self._conversation is not None:
            self._conversation.break_off("the connection ended", notice_s)

    # conversing

    def _connect(self) -> None:
        if self._conversation is not None:
            return
        if self.fleet.is_down or self.is_cut_off:
            self.later(self.rng.choice(_RECONNECT_S), self._connect)
            return
        holding = self.stage.part.generation if self.stage is not None else 0
        copies = tuple(Copy(cluster, stage, updates) for (cluster, stage), updates in self.shelf.items())
        self._conversation = Conversation(self.fleet, self, self.fleet.coordinator)
        self._conversation.say(
            Hello(release="1", profile=PROFILE, where=Whereabouts((("10.0.0.1", 9),)), holding=holding, copies=copies)
        )

    def conversation_ended(self, conversation: Conversation, *, again: bool = True) -> None:
        if self._conversation is conversation:
            self._conversation = None
            if again:
                self.later(self.rng.choice(_RECONNECT_S), self._connect)

    def say(self, said: Said) -> None:
        self.outbox.append(said)
        if self._conversation is not None:
            self._conversation.say_all()

    def _beat(self, conversation: Conversation, beat_s: float) -> None:
        if self._conversation is conversation:
            self.say(Beat())
            self.later(beat_s, lambda: self._beat(conversation, beat_s))

    def told(self, conversation: Conversation, told: Told) -> None:
        if self._conversation is not conversation:
            return
        match told:
            case Welcome(beat_s=beat_s):
                conversation.is_welcome = True
                conversation.say_all()
                self._beat(conversation, beat_s)
            case Desired(part=part):
                self._desire(part)
            case Tell(generation=generation, order=order):
                self._order(generation, order)
            case Give(transfer=number, copy=copy):
                Transfer(self, number).give(copy)
            case Keep(transfer=number, copy=copy):
                Transfer(self, number).take(lambda updates: self._keep(number, copy, updates))
            case Goodbye(again=again):
                self.conversation_ended(conversation, again=again)
                if not again:
                    self.kill()

    # converging

    def _desire(self, part: Part | None) -> None:
        before = 0 if self._desired is None else self._desired.generation
        if before == (0 if part is None else part.generation):
            return
        if part is not None:
            self.fleet.ledger.told(self.name, part)
        self._desired = part
        self._early.clear()
        if self.stage is not None:
            self.stage.end()
        elif not self._is_letting_go:
            self._take()

    def _take(self) -> None:
        part = self._desired
        if part is not None:
            self.stage = Stage(self, part)
            for order in self._early:
                self.stage.order(order)
        self._early.clear()

    def _order(self, generation: int, order: Order) -> None:
        """One that comes before its part waits for it."""
        if self._desired is None or self._desired.generation != generation:
            return
        if self.stage is not None and self.stage.part.generation == generation:
            self.stage.order(order)
        else:
            self._early.append(order)

    def stage_over(self, stage: Stage, failure: Failed | None) -> None:
        """It has let go of its lines; what it had learnt is put down, which takes a moment."""
        self.stage, self._is_letting_go = None, True
        generation, updates = stage.part.generation, stage.updates
        if failure is not None:
            self.say(Report(generation, failure))

        def put_down() -> None:
            self._is_letting_go = False
            copy = Copy(stage.part.cluster, stage.part.stage, updates) if stage.has_run and updates else None
            if copy is not None:
                self._put_on_shelf(copy)
            self.say(LetGo(generation, copy))
            if self._desired is not None and self._desired.generation != generation:
                self._take()

        self.later(self.rng.choice((0.01, 0.3, 2.0)), put_down)

    def _keep(self, number: int, copy: Copy, updates: int | None) -> None:
        if updates is None:
            self.say(Copied(number, reason="it could not be had"))
            return
        kept = Copy(copy.cluster, copy.stage, updates)
        self._put_on_shelf(kept)
        self.say(Copied(number, kept, 1000))

    def _put_on_shelf(self, copy: Copy) -> None:
        """The oldest go."""
        key = copy.cluster, copy.stage
        self.shelf = {**{k: v for k, v in self.shelf.items() if k != key}, key: copy.updates}
        self.shelf = dict(list(self.shelf.items())[-MOST_COPIES:])

    def report(self, generation: int, report: Any) -> None:
        self.say(Report(generation, report))
