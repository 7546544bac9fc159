"""A coordinator at work: its directory, its journal and its one port, from opening to closing.

The directory is kept between runs, so that nodes that have joined once come back by themselves:

    people (see `people`)   journal   address     where it listens now, for commands of this user
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import field
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

import psutil

from ..core.config import config, require
from ..core.errors import LinkError
from ..net.addresses import Address
from ..net.front import Front, FrontConfig, front_context
from ..net.hello import FEED_PROTOCOL, RELAY_PROTOCOL
from ..net.ticket import Ticket, new_token
from .coordinator import Coordinator
from .copying import CopyWishes
from .decide import Wishes, judge_token
from .events import CallerRefused, Event, LeaseGranted, LeaseSettled, NodeGone, Noted, RunBegun, RunEnded, TokenIssued
from .feed import FeedPort
from .journal import Journal, replay
from .members import members_only
from .patience import Patience
from .people import People
from .requester import Requester
from .rounds import AveragingWishes
from .server import make_app
from .status import Live, Status, status_of
from .web import WebPort

__all__ = ["Service", "ServiceConfig"]

_FLUSH_S = 0.25
_LATER = (LeaseGranted, LeaseSettled, CallerRefused)  # many, and written together
_MOST_ADDRESSES = 6


@config
class ServiceConfig:
    """Where it listens and keeps its files. `advertise` is what tickets say, else the addresses it has.

    `clock` gives unix time; it is read once, at the start.
    """

    directory: Path
    host: str = ""
    port: int = 7700
    advertise: tuple[Address, ...] = ()
    ticket_s: float = 7 * 86400.0
    ticket_uses: int | None = None
    wishes: Wishes = field(default_factory=Wishes)
    averaging: AveragingWishes = field(default_factory=AveragingWishes)
    copying: CopyWishes = field(default_factory=CopyWishes)
    front: FrontConfig = field(default_factory=FrontConfig)
    patience: Patience = field(default_factory=Patience)
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        require(0 <= self.port < 2**16, f"{self.port} is not a port: it is up to 65535")
        require(self.ticket_s > 0, "a ticket must be valid for more than 0 seconds")
        require(self.ticket_uses is None or self.ticket_uses >= 1, "a ticket has at least one use")


class Service:
    """Everything of a coordinator; lives in one asyncio loop.

    With `resume`, the run of that name is taken up where it was if the journal has it and it had not ended
    (`is_resumed`); else a run begins, with batch `first`.
    """

    def __init__(
        self,
        config: ServiceConfig,
        requester: Requester,
        *,
        run: str,
        steps: int | None = None,
        release: str = "",
        first: int = 0,
        resume: bool = False,
        on_event: Callable[[Event], None] = lambda event: None,
        live: Callable[[], Live] = Live,
    ) -> None:
        self.config = config
        self.people = People(config.directory, datetime.fromtimestamp(config.clock(), UTC))
        journal = config.directory / "journal"
        state, problems = replay(journal)
        self._journal = Journal(journal, on_trouble=self._trouble)
        self._on_event, self._live = on_event, live
        self.coordinator = Coordinator(
            state,
            requester,
            config.wishes,
            averaging=config.averaging,
            copying=config.copying,
            keep=self._kept,
            clock=config.clock,
            patience=config.patience,
        )
        for problem in problems:
            self.coordinator.note(problem)
        for name in [name for name, node in state.nodes.items() if node.is_present]:
            gone = NodeGone(self.coordinator.now_s(), name, "the coordinator was started anew", polite=True)
            self.coordinator.record(gone)
        self.is_resumed = resume and state.run == run and state.ended is None
        if self.is_resumed:
            self.coordinator.take_up()
        else:
            self.coordinator.record(RunBegun(self.coordinator.now_s(), run, steps, release, first))
        self._journal.compact(state)
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Listen; from then on nodes may come."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        coordinator = self.coordinator
        app = make_app(coordinator, self, self.config.patience)
        self._web = WebPort(
            app, request_s=self.config.patience.request_s, on_refused=coordinator.refused, on_error=coordinator.note
        )
        await self._web.open()
        self._front = Front(
            front_context(self.people.identity),
            {
                RELAY_PROTOCOL: members_only(coordinator.hub, coordinator.state.why_not_member, coordinator.refused),
                FEED_PROTOCOL: lambda: FeedPort(
                    coordinator.running.feed_for, coordinator.refused, hello_s=self.config.patience.hello_s
                ),
            },
            otherwise=self._web,
            config=self._front_config(),
        )
        try:
            self._server = await loop.create_server(self._front, sock=_listen(self.config.host, self.config.port))
        except OSError as error:
            raise LinkError(f"cannot listen at {self.config.host}:{self.config.port}: {error}") from error
        self.port: int = self._server.sockets[0].getsockname()[1]
        (self.config.directory / "address").write_text(f"127.0.0.1:{self.port}\n")
        self._tasks = [loop.create_task(coordinator.tend()), loop.create_task(self._flush())]

    async def tend(self) -> None:
        """Until it is closed; raises what went wrong in deciding, without which nothing else is worth going on."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)

    async def give_up(self) -> None:
        """Stop as a process that is killed does: nodes train on and wait, and the run may be taken up again."""
        for task in self._tasks:
            task.cancel()
        self._server.close()
        self._front.close()
        self._journal.flush(sync=True)
        self._journal.close()

    async def close(self, reason: str) -> None:
        """End all conversations and stop listening."""
        coordinator = self.coordinator
        coordinator.running.is_ending = True
        for cluster in list(coordinator.running.clusters):
            coordinator.running.end(cluster, reason, is_lost=False)
        coordinator.refusals.tell_all()
        coordinator.record(RunEnded(coordinator.now_s(), reason))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in list(coordinator.sessions.values()):
            session.dismiss(reason, again=True)
        await asyncio.sleep(0.2 if coordinator.sessions else 0)  # goodbyes go out
        self._server.close()
        self._front.close()
        coordinator.hub.close_all()
        await self._web.close()
        self._journal.flush(sync=True)
        self._journal.close()
        (self.config.directory / "address").unlink(missing_ok=True)

    def ticket(self) -> str:
        """One that is valid: an earlier one as long as it may be used, else a new one."""
        state, now_s = self.coordinator.state, self.coordinator.now_s()
        for token in state.tokens:
            if judge_token(state, token, now_s + min(3600.0, self.config.ticket_s / 2)) is None:
                return self._ticket(token)
        return self.new_ticket(self.config.ticket_s, self.config.ticket_uses)

    def new_ticket(self, expires_s: float, uses: int | None) -> str:
        require(0 < expires_s <= 10 * 365 * 86400, f"a ticket is valid for up to ten years, not {expires_s} s")
        require(uses is None or uses >= 1, f"a ticket has at least one use, not {uses}")
        token, now_s = new_token(), self.coordinator.now_s()
        self.coordinator.record(TokenIssued(now_s, token, now_s + expires_s, uses))
        return self._ticket(token)

    def _ticket(self, token: str) -> str:
        addresses = self.config.advertise or own_addresses(self.config.host, self.port)
        return str(Ticket(addresses=addresses, fingerprint=self.people.fingerprint, token=token))

    def status(self) -> Status:
        return status_of(self.coordinator.state, self.coordinator.now_s(), self._live())

    def _kept(self, event: Event) -> None:
        self._journal.append(event)
        if not isinstance(event, _LATER):
            self._journal.flush()
        self._on_event(event)

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            self._journal.flush()

    def _trouble(self, text: str) -> None:
        """The disk is full, or well again: said as an event, which is kept in memory meanwhile."""
        with contextlib.suppress(AttributeError, RuntimeError):  # before there is a loop it is too early to tell
            self._loop.call_soon(lambda: self.coordinator.record(Noted(self.coordinator.now_s(), text)))

    def _front_config(self) -> FrontConfig:
        given = {**vars(self.config.front), "on_refused": self.coordinator.refused}
        return FrontConfig(**given)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; without a host for IPv6 and IPv4 both, where the system can."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # it may be turned off
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=512)


def own_addresses(host: str, port: int) -> tuple[Address, ...]:
    """Where others may find us: the host we listen at, or all addresses of this machine, its own loopback last."""
    if host and not ip_address(host).is_unspecified:
        return ((host, port),)
    found = [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    usable = [text for text in dict.fromkeys(found) if not ip_address(text).is_link_local]
    usable.sort(key=lambda text: (ip_address(text).is_loopback, ":" in text))
    return tuple((text, port) for text in usable[:_MOST_ADDRESSES])
