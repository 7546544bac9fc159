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
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..core.control import Moved, Report, Tell, Whereabouts
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
from .partrun import Lent, PartRun
from .talk import Begin, Free, Freed, FromAgent, Opened, Take, Unable
from .whereabouts import Lookout
from .worker import begin_process

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
        self._names: frozenset[str] = frozenset()
        self._ring_names: frozenset[str] = frozenset()
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
                pace=None if limit is None else Pace(limit),
            )
            self._tell(Opened(door.address[1]))
            self._moved(lookout.where)
            lookout.start()
            while (run := self._todo.get()) is not None:
                self._be(run)
            lookout.close()

    def _expect(self, names: Sequence[str]) -> None:
        """Ring neighbours are let in too."""
        self._ring_names = frozenset(names)

    def _is_expected(self, name: str) -> bool:
        return name in self._names or name in self._ring_names

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
                        allowed=lambda name: name in self._names or name in self._ring_names,
                        reception=reception,
                    )
                except LinkError as refused:
                    error = refused
        raise error

    def _be(self, run: PartRun) -> None:
        """One part, to its end."""
        part = run.part
        self._names = frozenset(peer.name for peer in (part.before, part.after) if peer is not None)
        _log.info("generation %d: stage %d of %d in %s", part.generation, part.stage, part.count, part.cluster)
        run.run()
        self._names = self._ring_names = frozenset()
        with self._lock:
            self._parts.remove(run)
        del run
        gc.collect()
        give_back_memory()
        _log.info("generation %d is over", part.generation)
        self._tell(Freed(part.generation))

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
                case Stop():
                    self._stop(self._parts)
                    self._todo.put(None)

    def _new_part(self, take: Take) -> PartRun:
        assert self._lent is not None, "parts are taken after the door has been opened"
        return PartRun(take, self._lent, lambda report: self._tell(Report(take.part.generation, report)))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", type=int, required=True)
    options = parser.parse_args()
    begin_process()
    link = unix_link(socket.socket(fileno=options.control), LinkConfig(headers=FromAgent), peer="the agent")
    try:
        begin = link.receive(lambda header, lengths: [], deadline_s=_BEGIN_S)
        assert isinstance(begin, Begin), "an agent says first who its worker is"
        Station(link, begin).run()
    except RavnestError as error:
        _log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
