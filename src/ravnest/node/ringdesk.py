"""A stage's part in averaging: links to its ring neighbours, a snapshot for each round, and taking the average over.

Training goes on all the while. The loop is only asked for a copy of its weights between two actions, and later told
how far to move them; everything else happens in a thread of its own, which is cut short when another attempt begins
or nothing comes of the round. Each attempt of a round starts from the same snapshot.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field

import numpy as np

from ..core.errors import LinkError, RavnestError
from ..core.orders import Abandon, Average, Averaged, Begun, Commit, LayRings, NotAveraged, RingsReady, Shifted
from ..core.peers import Peer
from ..net.link import Link
from ..rings.attempt import Key
from ..rings.averaging import Averaging, Outcome
from ..rings.digest import digest
from ..rings.line import AveragingConfig
from ..rings.outer import Nesterov, step_nesterov
from ..rings.part import Part, codec_error, new_residual
from ..rings.spec import RingSpec
from ..runtime.loop import Loop
from .snapshot import Floats, flatten, unflatten
from .stagework import Tell

__all__ = ["RingDesk", "RingOrder"]

RingOrder = LayRings | Average | Commit | Abandon

_SNAPSHOT_S = 600.0
_REACH_AGAIN_S = 5.0
_LOOK_S = 0.1  # how often somebody who waits for links sees that there is something else to do


@dataclass
class _Round:
    """What a node has of the round it is in."""

    number: int
    updates: int  # of the snapshot
    snapshot: dict[int, Floats]
    results: dict[int, Floats]
    attempt: int = -1
    outer: str = "plain"


@dataclass
class _Rings:
    """What lasts as long as the rings: links, what codecs owe, and where the outer step stands."""

    laid: LayRings
    averaging: Averaging
    residuals: dict[int, Floats] = field(default_factory=dict)
    references: dict[int, Floats] = field(default_factory=dict)
    momenta: dict[int, Floats] = field(default_factory=dict)


class RingDesk:
    """`order` is for any thread; `reach` makes a link to a ring neighbour, `ask` has the loop do something."""

    def __init__(
        self,
        me: str,
        reach: Callable[[Peer, int], Link],
        ask: Callable[[Callable[[Loop], None]], None],
        tell: Tell,
        config: AveragingConfig | None = None,
    ) -> None:
        self._me, self._reach, self._ask, self._tell = me, reach, ask, tell
        self._config = config or AveragingConfig()
        self._todo: queue.SimpleQueue[RingOrder | None] = queue.SimpleQueue()
        self._rings: _Rings | None = None
        self._round: _Round | None = None
        self._closed_round = 0  # nothing of this round or an older one is begun again
        self._said: list[Begun | Averaged | NotAveraged | Shifted] = []  # of the latest round
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rings", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def order(self, order: RingOrder) -> None:
        """Have it carried out; what is under way is cut short if it is over by that."""
        self._todo.put(order)
        rings = self._rings
        if rings is not None and not isinstance(order, Commit):
            rings.averaging.cut_short()

    def close(self) -> None:
        self._stopping.set()
        self._todo.put(None)
        rings = self._rings
        if rings is not None:
            rings.averaging.cut_short()
        if self._thread.is_alive():
            self._thread.join(20.0)

    def _run(self) -> None:
        while (order := self._todo.get()) is not None and not self._stopping.is_set():
            try:
                self._carry_out(order)
            except (RavnestError, ValueError) as error:
                self._failed(order, str(error))
        self._let_go()

    def _carry_out(self, order: RingOrder) -> None:
        match order:
            case LayRings():
                self._lay(order)
            case Average():
                self._average(order)
            case Commit(round=number, attempt=attempt):
                self._commit(number, attempt)
            case Abandon(round=number):
                if self._round is not None and self._round.number <= number:
                    self._round = None
                self._closed_round = max(self._closed_round, number)

    def _failed(self, order: RingOrder, reason: str) -> None:
        if isinstance(order, Average):
            self._say(NotAveraged(order.round, order.attempt, reason[:500]))

    def _say(self, report: Begun | Averaged | NotAveraged | Shifted) -> None:
        self._said = [*(said for said in self._said if said.round == report.round), report]
        self._tell(report)

    def _say_again(self, number: int) -> None:
        """Who tells an order twice may not have heard the answer: it is lost if a connection breaks at that moment."""
        for report in self._said:
            if report.round == number:
                self._tell(report)

    # links

    def _lay(self, laid: LayRings) -> None:
        """Links to all neighbours at once; tried until they are there or other rings are laid."""
        if self._rings is not None and self._rings.laid == laid:
            self._tell(RingsReady(laid.generation))
            return
        self._let_go()
        while self._todo.empty() and not self._stopping.is_set():
            links = self._reach_all(laid)
            if links is not None:
                averaging = Averaging(links, self._config)
                averaging.__enter__()
                self._rings = _Rings(laid, averaging)
                self._tell(RingsReady(laid.generation))
                return
            if self._todo.empty():
                self._stopping.wait(_REACH_AGAIN_S)

    def _reach_all(self, laid: LayRings) -> dict[str, Link] | None:
        """None if a neighbour could not be reached, or if there is something else to do: the others are let go.

        Neighbours who have already been told of newer rings never answer, so nobody waits for them until the deadline.
        """
        calls = {peer.name: _call(self._reach, peer, laid.generation) for peer in laid.peers}
        waiting = set(calls.values())
        while waiting and self._todo.empty() and not self._stopping.is_set():
            done, waiting = wait(waiting, _LOOK_S, FIRST_EXCEPTION)
            if any(call.exception() is not None for call in done):
                break
        if not waiting and all(call.exception() is None for call in calls.values()):
            return {name: call.result() for name, call in calls.items()}
        for call in calls.values():
            call.add_done_callback(_close_link)
        errors = [error for call in calls.values() if call.done() and (error := call.exception()) is not None]
        if errors and not isinstance(errors[0], LinkError):
            raise errors[0]
        return None

    def _let_go(self) -> None:
        rings, self._rings, self._round = self._rings, None, None
        if rings is not None:
            rings.averaging.close()

    # rounds

    def _average(self, order: Average) -> None:
        rings = self._rings
        if rings is None or order.generation != rings.laid.generation or order.round <= self._closed_round:
            self._say_again(order.round)
            return
        if self._round is None or self._round.number != order.round:
            self._begin(order.round, rings)
        now = self._round
        assert now is not None
        if order.attempt <= now.attempt:
            self._say_again(order.round)
            return
        now.attempt, now.outer = order.attempt, order.outer
        parts = [self._part(rings, now, ring, order) for ring in self._taking_part(rings, order)]
        outcome = rings.averaging.run(Key(order.round, order.attempt), parts, deadline_s=order.within_s)
        self._report(order, now, parts, outcome)

    def _begin(self, number: int, rings: _Rings) -> None:
        """A snapshot at the loop's next pause, which is between two actions, so all of one version."""
        taken: Future[tuple[int, dict[int, Floats]]] = Future()

        def take(loop: Loop) -> None:
            try:
                taken.set_result((loop.schedule.updates, flatten(rings.laid.seats, loop.trainer.weights())))
            except RavnestError as error:
                taken.set_exception(error)

        self._ask(take)
        updates, snapshot = taken.result(_SNAPSHOT_S)
        self._round = _Round(number, updates, snapshot, {ring: np.empty_like(v) for ring, v in snapshot.items()})
        self._say(Begun(number))

    def _taking_part(self, rings: _Rings, order: Average) -> list[int]:
        return [seat.ring for seat in rings.laid.seats if self._me in order.weights]

    def _part(self, rings: _Rings, now: _Round, ring: int, order: Average) -> Part:
        seat = next(seat for seat in rings.laid.seats if seat.ring == ring)
        members = tuple(name for name in seat.members if name in order.weights)
        spec = RingSpec(
            id=ring, members=members, me=self._me, weights=tuple(order.weights[name] for name in members),
            codec=order.codec, piece_elements=order.piece_elements,
        )  # fmt: skip
        vector = now.snapshot[ring]
        if ring not in rings.residuals or not rings.residuals[ring].size:  # the codec may be another than last time
            rings.residuals[ring] = new_residual(spec, vector.size)
        return Part(spec, vector, now.results[ring], rings.residuals[ring])

    def _report(self, order: Average, now: _Round, parts: list[Part], outcome: Outcome) -> None:
        if outcome.failed:
            failure = next(iter(outcome.failed.values()))
            self._say(NotAveraged(order.round, order.attempt, str(failure)[:500], failure.member))
            return
        plain_bytes = sum(2 * (len(p.spec.members) - 1) * p.result.nbytes // len(p.spec.members) for p in parts)
        self._say(
            Averaged(
                round=order.round, attempt=order.attempt, digests={p.spec.id: digest(p.result) for p in parts},
                seconds=outcome.seconds, sent_bytes=outcome.sent_bytes,
                saved_bytes=max(0, plain_bytes - outcome.sent_bytes), codec_error=codec_error(parts),
            )
        )  # fmt: skip

    def _commit(self, number: int, attempt: int) -> None:
        now, rings = self._round, self._rings
        if rings is None or now is None or (now.number, now.attempt) != (number, attempt):
            self._say_again(number)
            return
        self._round, self._closed_round = None, number
        for ring, result in now.results.items():
            self._step(rings, ring, result, now.outer)
        seats = rings.laid.seats

        def take_over(loop: Loop) -> None:
            tensors, is_idle = loop.trainer.weights(), loop.schedule.in_flight == 0
            if is_idle and loop.schedule.updates == now.updates:
                loop.trainer.adopt(unflatten(seats, now.results, tensors))  # to the last bit
            else:
                for ring, result in now.results.items():
                    np.subtract(result, now.snapshot[ring], out=result)
                loop.trainer.shift(unflatten(seats, now.results, tensors), now=is_idle)
            self._say(Shifted(number))

        self._ask(take_over)

    def _step(self, rings: _Rings, ring: int, average: Floats, outer: str) -> None:
        """What becomes of an average; of the first of these rings nothing else, for there is nothing to go on from."""
        if outer == "plain":
            return
        if ring not in rings.references:
            rings.references[ring], rings.momenta[ring] = average.copy(), np.zeros_like(average)
            return
        step_nesterov(rings.references[ring], average, rings.momenta[ring], Nesterov())
        np.copyto(average, rings.references[ring])


def _call(reach: Callable[[Peer, int], Link], peer: Peer, generation: int) -> Future[Link]:
    """In a thread of its own, which keeps nobody from ending."""
    called: Future[Link] = Future()

    def run() -> None:
        try:
            called.set_result(reach(peer, generation))
        except Exception as error:  # whatever it is belongs to whoever waits for the link
            called.set_exception(error)

    threading.Thread(target=run, name=f"reach {peer.name}", daemon=True).start()
    return called


def _close_link(call: Future[Link]) -> None:
    if call.exception() is None:
        call.result().close()
