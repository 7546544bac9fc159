"""The worker process of a node in a fleet: lives as long as its agent does, and is one part after another.

    python -m ravnest.node.station --control 5

It opens the node's door once. A part that fails, whatever the reason, is told to the agent,
and the worker is free for the next; the door stays open all the while.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..core.control import Give, Keep, Moved, Report, Tell, Whereabouts
from ..core.errors import LinkError, RavnestError
from ..core.orders import Stop
from ..net.door import Door
from ..net.identity import Identity
from ..net.link import LinkConfig
from ..net.pace import Pace
from ..net.pump import Pump, PumpConfig
from ..net.reception import ReceptionConfig
from ..net.stream import StreamLink
from ..net.unix import unix_link
from .allocator import give_back_memory
from .copydesk import CopyDesk, Live
from .lent import Lent
from .partrun import PartRun
from .shelf import Shelf
from .talk import Begin, Free, Freed, FromAgent, Opened, Take, Unable
from .whereabouts import Lookout
from .worker import begin_process, live

__all__ = ["Station", "main"]

_BEGIN_S = 60.0
_TELL_S = 60.0
_REFUSALS_S = 1.0
_log = logging.getLogger("ravnest.station")


class _Refusals:
    """Writes down who is refused at the door, but no more than one a second, however many come."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def __call__(self, address: str, reason: str) -> None:
        if (now_s := time.monotonic()) - self._last_s >= _REFUSALS_S:
            self._last_s = now_s
            _log.info("refused %s: %s", address, reason)


class Station:
    """One thread computes; the control link's thread says what."""

    def __init__(self, link: StreamLink, begin: Begin) -> None:
        self._begin = begin
        self._identity = Identity.load(Path(begin.identity))
        self._todo: queue.SimpleQueue[PartRun | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # around the next
        self._parts: list[PartRun] = []  # the one that runs, and those to come
        self._lent: Lent | None = None
        self._copies: CopyDesk | None = None
        self._expected: dict[str, frozenset[str]] = {}  # who is let in, by what for
        self._expecting = threading.Lock()  # around changes of it
        self._pump = Pump(link, lambda header, lengths: [], self._heard, self._agent_lost, PumpConfig(capacity=256))

    def run(self) -> None:
        """Until the agent says stop, or is gone."""
        self._pump.start()
        try:
            self._work()
        except (RavnestError, ValueError) as error:
            _log.error("%s", error)
            self._tell(Unable(str(error)[:2000]))
        self._pump.close(flush_s=2.0)

    def _work(self) -> None:
        profile = self._begin.profile
        with self._open_door() as door:
            lookout = Lookout(door, self._begin.coordinator, self._moved)
            limit = self._begin.max_upload_bytes_per_s
            self._lent = Lent(
                identity=self._identity,
                door=door,
                where=lambda: lookout.where,
                memory_bytes=profile.memory_bytes,
                threads=profile.threads,
                expect=self._expect,
                shelf=Shelf(Path(self._begin.shelf)),
                pace=None if limit is None else Pace(limit),
            )
            self._lent.shelf.clear_drafts()
            self._copies = CopyDesk(self._lent, self._begin.coordinator, self._live, self._tell)
            self._tell(Opened(door.address[1]))
            self._moved(lookout.where)
            lookout.start()
            _get_ready()
            while (run := self._todo.get()) is not None:
                self._be(run)
            self._copies.close()
            lookout.close()

    def _expect(self, what: str, names: Sequence[str]) -> None:
        """A new dictionary each time: the door's thread reads it."""
        with self._expecting:
            others = {key: value for key, value in self._expected.items() if key != what}
            self._expected = {**others, what: frozenset(names)} if names else others

    def _is_expected(self, name: str) -> bool:
        return any(name in names for names in self._expected.values())

    def _live(self, cluster: str, stage: int) -> Live | None:
        """The part that is that stage, if one is."""
        with self._lock:
            found = [run for run in self._parts if (run.part.cluster, run.part.stage) == (cluster, stage)]
        return found[0] if found else None

    def _open_door(self) -> Door:
        """At the port that this node had before, if it is free; for IPv6 and IPv4, where there are both."""
        begin, error = self._begin, LinkError("there is no port to listen on")
        for port in (begin.port,) if begin.is_port_asked else (begin.port, 0):
            for host in ("::", "0.0.0.0"):
                try:
                    reception = ReceptionConfig(on_refused=_Refusals())
                    return Door(
                        (host, port),
                        self._identity,
                        allowed=self._is_expected,
                        reception=reception,
                    )
                except LinkError as refused:
                    error = refused
        raise error

    def _be(self, run: PartRun) -> None:
        """One part, to its end."""
        part = run.part
        self._expect("stages", [peer.name for peer in (part.before, part.after) if peer is not None])
        _log.info("generation %d: stage %d of %d in %s", part.generation, part.stage, part.count, part.cluster)
        run.run()
        self._expect("stages", [])
        self._expect("rings", [])
        with self._lock:
            self._parts.remove(run)
        kept = run.kept
        del run
        gc.collect()
        give_back_memory()
        _log.info("generation %d is over", part.generation)
        self._tell(Freed(part.generation, kept))

    def _heard(self, said: msgspec.Struct, _: Any) -> None:
        with self._lock:
            match said:
                case Take():
                    self._stop(self._parts)
                    self._parts.append(self._new_part(said))
                    self._todo.put(self._parts[-1])
                case Free(generation=generation):
                    self._stop([run for run in self._parts if run.part.generation == generation])
                case Tell(generation=generation, order=order):
                    for run in self._parts:
                        if run.part.generation == generation:
                            run.order(order)
                case Give() | Keep():
                    if self._copies is not None:
                        self._copies.order(said)
                case Stop():
                    self._stop(self._parts)
                    self._todo.put(None)

    def _new_part(self, take: Take) -> PartRun:
        assert self._lent is not None, "parts are taken after the door has been opened"
        assert self._copies is not None
        return PartRun(take, self._lent, self._copies, lambda report: self._tell(Report(take.part.generation, report)))

    @staticmethod
    def _stop(runs: Sequence[PartRun]) -> None:
        for run in runs:
            run.stop()

    def _agent_lost(self, error: Exception) -> None:
        self._heard(Stop(), ())

    def _moved(self, where: Whereabouts) -> None:
        self._tell(Moved(where))

    def _tell(self, said: msgspec.Struct) -> None:
        with contextlib.suppress(LinkError):  # an agent that is gone is noticed elsewhere
            self._pump.put(said, deadline_s=_TELL_S)


def _get_ready() -> None:
    """Have torch load what it loads when it first trains, a second's work: better now than when others wait for it."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", type=int, required=True)
    options = parser.parse_args()
    begin_process()
    link = unix_link(socket.socket(fileno=options.control), LinkConfig(headers=FromAgent), peer="the agent")

    def work() -> None:
        begin = link.receive(lambda header, lengths: [], deadline_s=_BEGIN_S)
        assert isinstance(begin, Begin), "an agent says first who its worker is"
        Station(link, begin).run()

    live(work)


if __name__ == "__main__":
    main()
