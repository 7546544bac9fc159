"""Connects a worker to members of a fleet on any host, and to the coordinator's feed.

Links between members use one port, mutual TLS, NAT traversal and a relay. The addresses of a node are those of its
interfaces and the one that the coordinator observes. A router keeps a NAT mapping only while it is used, so the
connection on which the coordinator observes the endpoint stays open; when it ends, another is opened.

The feed is the link from the first stage of a cluster to the coordinator, which supplies its batches: TLS to the
coordinator's port (ALPN `ravnest-feed`). Each side introduces itself with the generation and "feed " + the cluster's
name, the dialing side first; then frames are sent in both directions. The coordinator rejects a feed by closing it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from ravnest.core.clock import Backoff, Deadline
from ravnest.core.ids import COORDINATOR
from ravnest.errors import HandshakeError, LinkError
from ravnest.protocol.peer import Peer, PeerAddresses
from ravnest.protocol.relay import FEED_PROTOCOL
from ravnest.protocol.worker import StartWorker
from ravnest.transport.address import Address, show
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import Introduction, check_introduction
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.candidates import LocalCandidates, PeerCandidates
from ravnest.transport.p2p.dialer import receive_introduction, send_introduction
from ravnest.transport.p2p.endpoint import AcceptorConfig, PeerEndpoint
from ravnest.transport.p2p.relay_client import Observation, RelayInfo
from ravnest.transport.socket import Handshake, run_blocking, wait_ready
from ravnest.transport.stream import StreamLink
from ravnest.transport.tls import TlsChannel, authenticate, connect_tcp, tls_context, tune
from ravnest.worker.resources import PeerConnection

__all__ = ["RemotePeers", "choose_addresses", "is_loopback", "dial_feed"]


def dial_feed(
    address: Address, identity: Identity, config: LinkConfig, *, purpose: str, deadline_s: float
) -> StreamLink:
    """Open a link to the coordinator at `address` within `deadline_s`."""
    deadline = Deadline(deadline_s)
    context = tls_context(identity, server_side=False)
    context.set_alpn_protocols([FEED_PROTOCOL])
    mine = Introduction.of(config.generation, purpose)
    sock = connect_tcp(address, deadline)

    def handshake() -> Handshake[StreamLink]:
        tune(sock)
        channel = TlsChannel(sock, context, server_side=False)
        name = yield from authenticate(channel)
        if name != COORDINATOR:
            raise HandshakeError(f"expected the coordinator at {show(address)}, got {name}")
        yield from send_introduction(channel, mine)
        check_introduction(mine, (yield from receive_introduction(channel)), name)
        return StreamLink(channel, config, peer=name)

    return run_blocking(handshake(), sock, deadline)


# addresses of this node

_MAX_ADDRESSES = 16
_OBSERVE_S = 10.0
_POLL_S = 1.0


def interface_hosts() -> list[str]:
    """Return the addresses of all interfaces of this machine that are up."""
    states = psutil.net_if_stats()
    return [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        if name not in states or states[name].isup
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]


def choose_addresses(hosts: Iterable[str], port: int, *, is_local: bool, ipv6: bool) -> tuple[Address, ...]:
    """Return the addresses that peers can use; loopback if the coordinator `is_local`, or there is no other."""
    usable: list[str] = []
    loopback: list[str] = []
    for host in hosts:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:  # scoped to an interface: only valid on this machine
            continue
        if address.is_link_local or address.is_unspecified or (address.version == 6 and not ipv6):
            continue
        (loopback if address.is_loopback else usable).append(str(address))
    chosen = [*loopback, *usable] if is_local else usable or loopback
    return tuple((host, port) for host in dict.fromkeys(chosen))[:_MAX_ADDRESSES]


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class ReachabilityMonitor:
    """A thread that keeps the endpoint observed and calls `on_change` when its addresses change."""

    def __init__(
        self,
        endpoint: PeerEndpoint,
        coordinator: Address,
        on_change: Callable[[PeerAddresses], None],
        *,
        host: str = "",
    ) -> None:
        self._endpoint, self._on_change, self._host = endpoint, on_change, host
        self._relay = RelayInfo(address=coordinator, token="")
        self._is_local = is_loopback(coordinator[0])
        self._closing = threading.Event()
        self.addresses = PeerAddresses(addresses=self._interface_addresses(), host=host)
        self._thread = threading.Thread(target=self._run, name="reachability", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._closing.set()

    def _interface_addresses(self) -> tuple[Address, ...]:
        ipv6 = ":" in self._endpoint.address[0]
        return choose_addresses(interface_hosts(), self._endpoint.address[1], is_local=self._is_local, ipv6=ipv6)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._closing.is_set():
            observation = self._observe()
            observed = observation.observed if observation else None
            addresses = PeerAddresses(self._interface_addresses(), observed, self._host)
            if addresses != self.addresses:
                self.addresses = addresses
                self._on_change(addresses)
            if observation is None:
                self._closing.wait(backoff.next_s())
            else:
                backoff.reset()
                self._hold(observation)

    def _observe(self) -> Observation | None:
        try:
            return self._endpoint.observe(self._relay, deadline_s=_OBSERVE_S)
        except (LinkError, OSError):  # also while the port is still in use by the previous connection
            return None

    def _hold(self, observation: Observation) -> None:
        """Keep the connection open until the relay ends it."""
        with contextlib.closing(observation), contextlib.suppress(OSError):
            while not self._closing.is_set():
                if wait_ready(observation.sock, selectors.EVENT_READ, _POLL_S) and not observation.sock.recv(4096):
                    return


_REJECTIONS_S = 1.0
_log = logging.getLogger("ravnest.worker")


class RemotePeers:
    """Listens for the members that `allowed` admits, and connects to them; `on_change` gets new addresses."""

    def __init__(
        self, start: StartWorker, allowed: Callable[[str], bool], on_change: Callable[[PeerAddresses], None]
    ) -> None:
        self._coordinator = start.coordinator
        self._identity = Identity.load(Path(start.identity))
        self._endpoint = _open_endpoint(start, self._identity, allowed)
        self._monitor = ReachabilityMonitor(self._endpoint, start.coordinator, on_change, host=start.host)

    @property
    def port(self) -> int:
        return self._endpoint.address[1]

    @property
    def addresses(self) -> PeerAddresses:
        return self._monitor.addresses

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Listen for members inside this context."""
        with self._endpoint:
            yield
            self._monitor.close()

    def watch(self) -> None:
        """Start to keep the address that the coordinator observes up to date."""
        self._monitor.start()

    def connect(self, peer: Peer, purpose: str, config: LinkConfig, *, deadline_s: float) -> PeerConnection:
        """Return a link to a member, which must connect to this node too."""
        candidates = PeerCandidates(
            name=peer.name,
            addresses=peer.addresses.addresses,
            observed=peer.addresses.observed,
            relay=RelayInfo(address=self._coordinator, token=peer.relay_token),
            purpose=purpose,
        )
        own = self.addresses
        local = LocalCandidates(addresses=own.addresses, observed=own.observed)
        connection = self._endpoint.connect(candidates, config, local=local, deadline_s=deadline_s)
        return PeerConnection(connection.link, connection.kind, connection.reason, connection.hint)

    def connect_feed(self, purpose: str, config: LinkConfig, *, deadline_s: float) -> StreamLink:
        """Return the link to the coordinator that feeds the first stage."""
        return dial_feed(self._coordinator, self._identity, config, purpose=purpose, deadline_s=deadline_s)


class _RejectionLog:
    """Logs rejected connections, at most one a second."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def __call__(self, address: str, reason: str) -> None:
        if (now_s := time.monotonic()) - self._last_s >= _REJECTIONS_S:
            self._last_s = now_s
            _log.info("rejected %s: %s", address, reason)


def _open_endpoint(start: StartWorker, identity: Identity, allowed: Callable[[str], bool]) -> PeerEndpoint:
    """Listen at the port that this node had before, if it is free; on IPv6 and IPv4, where there are both."""
    error = LinkError("no port to listen on")
    for port in (start.port,) if start.is_port_fixed else (start.port, 0):
        for host in ("::", "0.0.0.0"):
            try:
                acceptor = AcceptorConfig(on_rejected=_RejectionLog())
                return PeerEndpoint((host, port), identity, allowed=allowed, acceptor=acceptor)
            except LinkError as failure:
                error = failure
    raise error
