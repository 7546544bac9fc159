"""One part of one generation in a worker of a fleet: its files are read, its neighbours reached, its stage run.

Nothing in the files is trusted: the stage is checked as every stage file is, within the memory that is lent; what the
brief says of this machine (threads, core, paths) is replaced by what the machine's owner said. It may be told to stop
at any moment, and then leaves nothing behind but a copy of what it had learnt, on the shelf: for whoever goes on with
that stretch of the model, here or elsewhere.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path

import msgspec
import torch

from ..core.config import require
from ..core.control import Copy, Part, Peer
from ..core.errors import LinkError, ProgramError, RavnestError
from ..core.messages import Data
from ..core.orders import Abandon, Average, Commit, LayRings, Linked, Order, Stop
from ..graph import Limits, Stage, load
from ..net.addresses import Address
from ..net.feeding import dial_feed, feed_purpose
from ..net.link import Link, LinkConfig
from ..rings.line import AveragingConfig
from ..rings.messages import Message
from ..runtime.loop import Loop
from ..runtime.statefile import write_state
from .copydesk import CopyDesk
from .lent import Lent
from .orders import Assign
from .ringdesk import RingDesk
from .stagework import StageWork, Tell, failure_of
from .talk import Take

__all__ = ["PartRun"]

_REACH_S = 60.0
_COPIES_S = 600.0  # that neighbours may take to get what they begin from
_PAUSE_S = 600.0
_DEAD_S = 5.0  # a neighbour whose PC answers nothing for so long is gone, for now
_FEED_S = 20.0
_FLUSH_S = 1.0


_log = logging.getLogger("ravnest.part")


class _Stopped(Exception):
    """It was told to stop before it ran."""


class PartRun:
    """`run` does all of it in the calling thread; `order` and `stop` are for others."""

    def __init__(self, take: Take, lent: Lent, copies: CopyDesk, tell: Tell) -> None:
        self.part: Part = take.part
        self.kept: Copy | None = None  # of what it had learnt, when it is over
        self._take, self._lent, self._copies, self._tell = take, lent, copies, tell
        self._dialling = _Dialling()
        self._lock = threading.Lock()  # around the next three
        self._early: list[Order] = []
        self._work: StageWork | None = None
        self._desk: RingDesk | None = None
        self._asked: set[Future[int]] = set()
        self._is_stopped = False

    def run(self) -> None:
        """Until it is told to stop, or fails; the failure is told."""
        try:
            self._run()
        except _Stopped:
            pass
        except Exception as error:  # the supervisor of this part: the coordinator must know why, whatever it was
            if not self._is_stopped:
                self._tell(failure_of(error))

    def order(self, order: Order) -> None:
        if isinstance(order, LayRings):
            self._lent.expect("rings", [peer.name for peer in order.peers])
        with self._lock:
            self._is_stopped |= isinstance(order, Stop)
            if self._work is None or self._desk is None:
                self._early.append(order)
            else:
                self._pass_on(order)
        if isinstance(order, Stop):
            self._dialling.stop()

    def stop(self) -> None:
        self.order(Stop())

    def copy_to(self, path: Path) -> int:
        """Write what it has learnt so far, in its next pause; after how many updates. For other threads.

        The stage waits while the system takes the file, because a copy in memory might be more than there is.
        """
        taken: Future[int] = Future()

        def take(loop: Loop) -> None:
            if taken.set_running_or_notify_cancel():
                try:
                    state = loop.trainer.state(whole=False, copies=False)
                    write_state(state, path)
                    taken.set_result(state.updates)
                except (OSError, RavnestError) as error:
                    taken.set_exception(error)

        with self._lock:
            if self._work is None:
                raise RavnestError("the stage does not run yet, or no more")
            self._asked.add(taken)
            self._work.ask(take)
        try:
            return taken.result(_PAUSE_S)
        except CancelledError as error:
            raise RavnestError("the stage has just ended") from error
        except TimeoutError as error:
            raise RavnestError(f"the stage made no pause within {_PAUSE_S:g} s") from error
        finally:
            self._asked.discard(taken)

    def wait(self, timeout_s: float, /) -> bool:
        """Until its own messages are sent, but not for long."""
        with self._lock:
            work = self._work
        return True if work is None else work.wait(timeout_s)

    def _run(self) -> None:
        if self._is_stopped:
            raise _Stopped
        assign = self._read_brief()
        torch.set_num_threads(assign.threads)
        lent = self._lent
        limits = Limits(batch=assign.max_batch, state_bytes=lent.memory_bytes, value_bytes=lent.memory_bytes)
        stage = load(Path(self._take.file).read_bytes(), limits)
        self._check(stage)
        states = [*self._copies.gather(stage, self.part.sources, Path(self._take.file).parent), *self._take.states]
        assign = msgspec.structs.replace(assign, begin=self.part.begin, state=tuple(map(str, states)))
        before, after = self._connect()
        try:
            is_fed = self.part.before is None
            work = StageWork(stage, assign, limits, before, after, self._tell, lent.pace, is_fed=is_fed)
        except BaseException:
            before.close()
            if after is not None:
                after.close()
            raise
        config = AveragingConfig(turn=work, pace=lent.pace)
        desk = RingDesk(lent.identity.name, self._reach_ring, work.ask, self._tell, config)
        desk.start()
        try:
            self._begin(work, desk)
            work.run()
            self._keep(work)
        except LinkError:  # a neighbour's end is no reason to lose what this one has learnt
            self._keep(work)
            raise
        finally:
            with self._lock:
                self._work = self._desk = None  # their memory goes with them
                for asked in tuple(self._asked):
                    asked.cancel()
            desk.close()
            work.close(flush_s=_FLUSH_S if self._is_stopped else 0.0)

    def _keep(self, work: StageWork) -> None:
        """Put what was learnt on the shelf; a PC without room for it goes on without."""
        state = work.state()
        if not state.updates:
            return
        copy, shelf = Copy(self.part.cluster, self.part.stage, state.updates), self._lent.shelf
        try:
            with shelf.writing() as path:
                write_state(state, path)
                shelf.put(path, copy)
            self.kept = copy
        except (OSError, RavnestError) as error:
            _log.warning("nothing is kept of what stage %d had learnt: %s", copy.stage, error)

    def _read_brief(self) -> Assign:
        try:
            assign = msgspec.msgpack.decode(Path(self._take.brief).read_bytes(), type=Assign)
        except ValueError as error:
            raise ProgramError(f"how to train this part cannot be read: {error}") from error
        threads = max(1, min(assign.threads, self._lent.threads))
        return msgspec.structs.replace(assign, threads=threads, core=-1, weights=self._take.weights)

    def _check(self, stage: Stage) -> None:
        part = self.part
        if (stage.index, stage.count) != (part.stage, part.count):
            raise ProgramError(
                f"the file is stage {stage.index} of {stage.count}, the part is {part.stage} of {part.count}"
            )
        require((part.before is None) == (stage.index == 0), "only the first stage has none before it")
        require((part.after is None) == (stage.index == stage.count - 1), "only the last stage has none after it")

    def _begin(self, work: StageWork, desk: RingDesk) -> None:
        """From now on orders go to the stage; those that came before go first."""
        with self._lock:
            self._work, self._desk = work, desk
            for order in self._early:
                self._pass_on(order)

    def _pass_on(self, order: Order) -> None:
        assert self._work is not None
        assert self._desk is not None
        if isinstance(order, LayRings | Average | Commit | Abandon):
            self._desk.order(order)
        else:
            self._work.order(order)

    def _connect(self) -> tuple[Link, Link | None]:
        """Links to both sides, dialled at once."""
        dialling, part = self._dialling, self.part
        before, after = part.before, part.after
        dialling.start("before", self._dial_feed if before is None else lambda: self._reach(before))
        if after is not None:
            dialling.start("after", lambda: self._reach(after))
        links = dialling.wait()
        return links["before"], links.get("after")

    def _reach_ring(self, peer: Peer, generation: int) -> Link:
        return self._reach(peer, "ring", LinkConfig(headers=Message, generation=generation))

    def _reach(self, peer: Peer, purpose: str = "stage", config: LinkConfig | None = None) -> Link:
        within_s = _COPIES_S if purpose == "stage" and self.part.begin else _REACH_S
        config = config or self._link_config()
        reached = self._lent.reach(peer, purpose, config, coordinator=self._take.coordinator, deadline_s=within_s)
        self._tell(Linked(peer.name, reached.how, reached.reason[:1000], reached.hint[:1000]))
        return reached.link

    def _dial_feed(self) -> Link:
        address: Address = self._take.coordinator
        purpose = feed_purpose(self.part.cluster)
        return dial_feed(address, self._lent.identity, self._link_config(), purpose=purpose, deadline_s=_FEED_S)

    def _link_config(self) -> LinkConfig:
        return LinkConfig(headers=Data, generation=self.part.generation, dead_after_s=_DEAD_S)


class _Dialling:
    """Several calls at once, each in a thread of its own. Links that nobody waits for any more are closed."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[tuple[str, Link | Exception] | None] = queue.SimpleQueue()
        self._links: dict[str, Link] = {}
        self._sides: set[str] = set()
        self._lock = threading.Lock()  # around the next
        self._is_over = False

    def start(self, side: str, dial: Callable[[], Link]) -> None:
        self._sides.add(side)
        threading.Thread(target=self._dial, args=(side, dial), name=f"dial {side}", daemon=True).start()

    def stop(self) -> None:
        self._answers.put(None)

    def wait(self) -> dict[str, Link]:
        """All links, or else none: raises the first failure, or `_Stopped`."""
        try:
            while len(self._links) < len(self._sides):
                answer = self._answers.get()  # each call has a deadline of its own
                if answer is None:
                    raise _Stopped
                self._take(*answer)
            return self._links
        except BaseException:
            self._give_up()
            raise

    def _dial(self, side: str, dial: Callable[[], Link]) -> None:
        answer: Link | Exception
        try:
            answer = dial()
        except Exception as error:  # told to the thread that waits
            answer = error
        with self._lock:
            if not self._is_over:
                self._answers.put((side, answer))
            elif not isinstance(answer, Exception):
                answer.close()

    def _take(self, side: str, answer: Link | Exception) -> None:
        if isinstance(answer, LinkError):
            raise LinkError(f"the stage {side} this one cannot be reached: {answer}") from answer
        if isinstance(answer, Exception):
            raise answer
        self._links[side] = answer

    def _give_up(self) -> None:
        with self._lock:
            self._is_over = True
        while not self._answers.empty():
            if (answer := self._answers.get()) is not None and not isinstance(answer[1], Exception):
                answer[1].close()
        for link in self._links.values():
            link.close()
