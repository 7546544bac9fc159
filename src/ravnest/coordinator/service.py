"""Runs a coordinator: its directory, its journal and its port, from opening to closing.

The directory is persistent, so that enrolled nodes reconnect by themselves:

    authority/, coordinator/, requester/   identities, see `certificates`
    journal                                events, see `journal`
    address                                where the coordinator listens, for commands of this user
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
from aiohttp import web

from ravnest.coordinator.certificates import CertificateAuthority
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.events import (
    ConnectionRejected,
    Event,
    LeaseGranted,
    LeaseSettled,
    NodeEnrolled,
    NodeLost,
    NoteAdded,
    RunEnded,
    RunStarted,
    TokenIssued,
)
from ravnest.coordinator.http.alpn_server import (
    AlpnServer,
    AlpnServerConfig,
    HttpProtocol,
    members_only,
    server_context,
)
from ravnest.coordinator.http.feed import FeedProtocol
from ravnest.coordinator.http.limits import HttpTimeouts
from ravnest.coordinator.http.server import make_app
from ravnest.coordinator.journal import Journal, replay
from ravnest.coordinator.policy.averaging import AveragingPolicy
from ravnest.coordinator.policy.membership import MembershipPolicy, token_rejection
from ravnest.coordinator.policy.replication import ReplicationPolicy
from ravnest.coordinator.requester import Requester
from ravnest.coordinator.status import RunStatus, RuntimeStatus, status_of
from ravnest.core.config import config, require
from ravnest.errors import LinkError
from ravnest.protocol.control import NodeWork
from ravnest.protocol.relay import FEED_PROTOCOL, RELAY_PROTOCOL
from ravnest.transport.address import Address
from ravnest.transport.local import control_socket, feed_socket, listen_local
from ravnest.transport.ticket import Ticket, new_token

__all__ = ["CoordinatorServer", "CoordinatorConfig"]

_FLUSH_S = 0.25
_FREQUENT = (LeaseGranted, LeaseSettled, ConnectionRejected)  # frequent, and written together
_MAX_ADDRESSES = 6


@config
class CoordinatorConfig:
    """Addresses, directory and policies of a coordinator.

    `advertise` are the addresses in tickets; by default, those of this machine. `clock` gives unix time; it is read
    once, at the start.
    """

    directory: Path
    host: str = ""
    port: int | None = 7700  # None: only nodes of this host connect, by `sockets`
    sockets: Path | None = None  # a private directory for `local_nodes`, which need no ticket
    local_nodes: tuple[str, ...] = ()
    advertise: tuple[Address, ...] = ()
    ticket_s: float = 7 * 86400.0
    ticket_uses: int | None = None
    membership: MembershipPolicy = field(default_factory=MembershipPolicy)
    averaging: AveragingPolicy = field(default_factory=AveragingPolicy)
    replication: ReplicationPolicy = field(default_factory=ReplicationPolicy)
    alpn: AlpnServerConfig = field(default_factory=AlpnServerConfig)
    timeouts: HttpTimeouts = field(default_factory=HttpTimeouts)
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        require(self.port is not None or self.sockets is not None, "port or sockets must be set")
        require(self.port is None or 0 <= self.port < 2**16, f"port must be between 0 and 65535, got {self.port}")
        require(self.ticket_s > 0, f"ticket_s must be > 0, got {self.ticket_s}")
        require(self.ticket_uses is None or self.ticket_uses >= 1, f"ticket_uses must be >= 1, got {self.ticket_uses}")


class CoordinatorServer:
    """A coordinator with its journal and its port; runs in one asyncio loop.

    With `resume`, the run of that name continues if the journal has it and it had not ended (`is_resumed`); else a new
    run starts with batch `first`.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        requester: Requester,
        *,
        run: str,
        steps: int | None = None,
        release: str = "",
        first: int = 0,
        resume: bool = False,
        on_event: Callable[[Event], None] = lambda event: None,
        live: Callable[[], RuntimeStatus] = RuntimeStatus,
        contribution_of: Callable[[str], NodeWork | None] = lambda name: None,
        extend: Callable[[web.Application, CoordinatorServer], None] = lambda app, server: None,
    ) -> None:
        """`extend` adds resources to the app of the port; `contribution_of` is what nodes are thanked for."""
        self.config = config
        self._extend = extend
        self._authority: CertificateAuthority | None = None
        if config.port is not None:
            self._authority = CertificateAuthority(config.directory, datetime.fromtimestamp(config.clock(), UTC))
        config.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        journal = config.directory / "journal"
        state, problems = replay(journal)
        away_s = max(config.clock() - state.last_event_s, 0.0)
        self._journal = Journal(journal, on_trouble=self._trouble)
        self._on_event, self._live = on_event, live
        self.coordinator = Coordinator(
            state,
            requester,
            config.membership,
            averaging=config.averaging,
            replication=config.replication,
            persist=self._persist,
            clock=config.clock,
            timeouts=config.timeouts,
        )
        self.coordinator.contribution_of = contribution_of
        for problem in problems:
            self.coordinator.note(problem)
        for name in [name for name, node in state.nodes.items() if node.is_present]:
            lost = NodeLost(self.coordinator.now_s(), name, "the coordinator was restarted", is_voluntary=True)
            self.coordinator.record(lost)
        self.is_resumed = resume and state.run == run and state.end_reason is None
        if self.is_resumed:
            self.coordinator.resume(away_s)
        else:
            self.coordinator.record(RunStarted(self.coordinator.now_s(), run, steps, release, first))
        for name in config.local_nodes:
            self.coordinator.record(NodeEnrolled(self.coordinator.now_s(), name, key="", token=""))
        self._journal.compact(state)
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = contextlib.AsyncExitStack()

    @property
    def authority(self) -> CertificateAuthority:
        assert self._authority is not None, "a coordinator without a port has no certificates"
        return self._authority

    async def open(self) -> None:
        """Listen; from then on nodes may connect."""
        self._loop = asyncio.get_running_loop()
        self._app = make_app(self.coordinator, self, self.config.timeouts)
        self._extend(self._app, self)
        if self.config.sockets is not None:
            await self._open_sockets(self.config.sockets)
        if self.config.port is not None:
            await self._open_port(self.config.port)
        self._tasks = [self._loop.create_task(self.coordinator.run()), self._loop.create_task(self._flush())]

    async def _open_sockets(self, directory: Path) -> None:
        """Serve nodes of this process by unix sockets: HTTP at one, feeds at the other."""
        runner = web.AppRunner(self._app, access_log=None, handle_signals=False)
        await runner.setup()
        await web.SockSite(runner, listen_local(control_socket(directory))).start()
        self._closing.push_async_callback(runner.cleanup)
        feeds = await self._loop.create_unix_server(self._new_feed, sock=listen_local(feed_socket(directory)))
        self._closing.callback(feeds.close)
        pointer = self.config.directory / "socket"
        pointer.write_text(f"{control_socket(directory)}\n")
        self._closing.callback(lambda: pointer.unlink(missing_ok=True))

    async def _open_port(self, port: int) -> None:
        """Serve members of a fleet over TLS: HTTP, feeds and the relay at one port."""
        coordinator = self.coordinator
        web_protocol = HttpProtocol(
            self._app,
            request_s=self.config.timeouts.request_s,
            on_rejected=coordinator.log_rejection,
            on_error=coordinator.note,
        )
        await web_protocol.open()
        self._closing.push_async_callback(web_protocol.close)
        self._closing.callback(coordinator.relay.close_all)
        front = AlpnServer(
            server_context(self.authority.identity),
            {
                RELAY_PROTOCOL: members_only(
                    coordinator.relay, coordinator.state.rejection_reason, coordinator.log_rejection
                ),
                FEED_PROTOCOL: self._new_feed,
            },
            default=web_protocol,
            config=self._alpn_config(),
        )
        try:
            server = await self._loop.create_server(front, sock=_listen(self.config.host, port))
        except OSError as error:
            raise LinkError(f"cannot listen at {self.config.host}:{port}: {error}") from error
        self._closing.callback(front.close)
        self._closing.callback(server.close)
        self.port: int = server.sockets[0].getsockname()[1]
        pointer = self.config.directory / "address"
        pointer.write_text(f"127.0.0.1:{self.port}\n")
        self._closing.callback(lambda: pointer.unlink(missing_ok=True))

    def _new_feed(self) -> FeedProtocol:
        coordinator = self.coordinator
        return FeedProtocol(
            coordinator.running.feed_for, coordinator.log_rejection, hello_s=self.config.timeouts.hello_s
        )

    async def run(self) -> None:
        """Run until it is closed; raises the error of a background task."""
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)

    async def abort(self) -> None:
        """Stop like a killed process: nodes continue training and wait, and the run can be resumed."""
        for task in self._tasks:
            task.cancel()
        await self._closing.aclose()
        self._journal.flush(sync=True)
        self._journal.close()

    async def close(self, reason: str, *, is_over: bool = True) -> None:
        """End the run and all sessions, and stop listening. Unless `is_over`, nodes wait for the run to be resumed."""
        coordinator = self.coordinator
        coordinator.running.is_ending = True
        for cluster in list(coordinator.running.clusters):
            coordinator.running.end_cluster(cluster, reason, is_lost=False)
        coordinator.rejections.flush()
        coordinator.record(RunEnded(coordinator.now_s(), reason))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        nodes = coordinator.state.nodes.items()
        is_incomplete = any(node.is_present and name not in coordinator.sessions for name, node in nodes)
        for name in list(coordinator.sessions):
            coordinator.say_goodbye(name, is_run_over=is_over)
        await asyncio.sleep(0.2 if coordinator.sessions else 0)  # let `Disconnect` messages be sent
        if is_over and is_incomplete:
            await asyncio.sleep(self.config.timeouts.reconnect_s)
        await self._closing.aclose()
        self._journal.flush(sync=True)
        self._journal.close()

    def ticket(self) -> str:
        """A valid ticket: an earlier one while it may be used, else a new one."""
        state, now_s = self.coordinator.state, self.coordinator.now_s()
        for token in state.tokens:
            if token_rejection(state, token, now_s + min(3600.0, self.config.ticket_s / 2)) is None:
                return self._ticket(token)
        return self.new_ticket(self.config.ticket_s, self.config.ticket_uses)

    def new_ticket(self, expires_s: float, uses: int | None) -> str:
        require(0 < expires_s <= 10 * 365 * 86400, f"expires_s must be > 0 and at most ten years, got {expires_s}")
        require(uses is None or uses >= 1, f"uses must be >= 1, got {uses}")
        token, now_s = new_token(), self.coordinator.now_s()
        self.coordinator.record(TokenIssued(now_s, token, now_s + expires_s, uses))
        return self._ticket(token)

    def _ticket(self, token: str) -> str:
        addresses = self.config.advertise or own_addresses(self.config.host, self.port)
        return str(Ticket(addresses=addresses, fingerprint=self.authority.fingerprint, token=token))

    def status(self) -> RunStatus:
        return status_of(self.coordinator.state, self.coordinator.now_s(), self._live())

    def _persist(self, event: Event) -> None:
        self._journal.append(event)
        if not isinstance(event, _FREQUENT):
            self._journal.flush()
        self._on_event(event)

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            self._journal.flush()

    def _trouble(self, text: str) -> None:
        """Record a problem of the journal as an event, which waits in memory meanwhile."""
        with contextlib.suppress(AttributeError, RuntimeError):  # there is no loop before `open`
            self._loop.call_soon(lambda: self.coordinator.record(NoteAdded(self.coordinator.now_s(), text)))

    def _alpn_config(self) -> AlpnServerConfig:
        given = {**vars(self.config.alpn), "on_rejected": self.coordinator.log_rejection}
        return AlpnServerConfig(**given)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; without a host, for IPv6 and IPv4 if the system supports both."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be disabled
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=512)


def own_addresses(host: str, port: int) -> tuple[Address, ...]:
    """Addresses for tickets: the listening host, or all addresses of this machine, loopback last."""
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
    return tuple((text, port) for text in usable[:_MAX_ADDRESSES])
