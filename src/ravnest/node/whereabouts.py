"""Where this node's door is: the addresses of its own interfaces, and where the coordinator sees it.

A router keeps what it has translated only while something uses it, so the connection by which the coordinator sees the
door stays open; when it ends, there is another.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import threading
from collections.abc import Callable, Iterable

import psutil

from ..core.control import Whereabouts
from ..core.errors import LinkError
from ..net.addresses import Address
from ..net.door import Door
from ..net.sockets import wait_ready
from ..net.tunnel import Observation, RelayInfo
from .backoff import Backoff

__all__ = ["Lookout", "choose_addresses", "interface_hosts", "is_loopback"]

_MOST_ADDRESSES = 16
_OBSERVE_S = 10.0
_LOOK_S = 1.0


def interface_hosts() -> list[str]:
    """The addresses of all interfaces of this machine that are up."""
    states = psutil.net_if_stats()
    return [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        if name not in states or states[name].isup
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]


def choose_addresses(hosts: Iterable[str], port: int, *, near_home: bool, ipv6: bool) -> tuple[Address, ...]:
    """Those by which peers may reach the door; loopback where the coordinator is on it, or there is nothing else."""
    found: list[str] = []
    loopback: list[str] = []
    for host in hosts:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:  # with the name of an interface behind it: of use on this machine only
            continue
        if address.is_link_local or address.is_unspecified or (address.version == 6 and not ipv6):
            continue
        (loopback if address.is_loopback else found).append(str(address))
    chosen = [*loopback, *found] if near_home else found or loopback
    return tuple((host, port) for host in dict.fromkeys(chosen))[:_MOST_ADDRESSES]


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Lookout:
    """A thread that keeps the door observed, and says so each time that something is new."""

    def __init__(self, door: Door, coordinator: Address, say: Callable[[Whereabouts], None]) -> None:
        self._door, self._say = door, say
        self._relay = RelayInfo(address=coordinator, token="")
        self._near_home = is_loopback(coordinator[0])
        self._leaving = threading.Event()
        self.where = Whereabouts(addresses=self._addresses())
        self._thread = threading.Thread(target=self._run, name="lookout", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """It leaves by itself, at once where it can; nobody waits for it."""
        self._leaving.set()

    def _addresses(self) -> tuple[Address, ...]:
        ipv6 = ":" in self._door.address[0]
        return choose_addresses(interface_hosts(), self._door.address[1], near_home=self._near_home, ipv6=ipv6)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._leaving.is_set():
            observation = self._observe()
            where = Whereabouts(addresses=self._addresses(), observed=observation.seen if observation else None)
            if where != self.where:
                self.where = where
                self._say(where)
            if observation is None:
                self._leaving.wait(backoff.next_s())
            else:
                backoff.reset()
                self._keep(observation)

    def _observe(self) -> Observation | None:
        try:
            return self._door.observe(self._relay, deadline_s=_OBSERVE_S)
        except (LinkError, OSError):  # also when the port is not free for another connection there yet
            return None

    def _keep(self, observation: Observation) -> None:
        """Until the relay ends it."""
        with contextlib.closing(observation), contextlib.suppress(OSError):
            while not self._leaving.is_set():
                if wait_ready(observation.sock, selectors.EVENT_READ, _LOOK_S) and not observation.sock.recv(4096):
                    return
