"""Addresses of this node's endpoint: those of its interfaces, and the one that the coordinator observes.

A router keeps a NAT mapping only while it is used, so the connection on which the coordinator observes the endpoint
stays open; when it ends, another is opened.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import threading
from collections.abc import Callable, Iterable

import psutil

from ravnest.core.backoff import Backoff
from ravnest.errors import LinkError
from ravnest.protocol.peer import PeerAddresses
from ravnest.transport.address import Address
from ravnest.transport.p2p.endpoint import PeerEndpoint
from ravnest.transport.p2p.relay_client import Observation, RelayInfo
from ravnest.transport.socket import wait_ready

__all__ = ["ReachabilityMonitor", "choose_addresses", "interface_hosts", "is_loopback"]

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
