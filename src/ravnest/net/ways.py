"""The ways to a peer, as data: which to try, when, and what to say about the one that worked.

Near addresses first (the same home), then those the world sees, then the rest; IPv6 and IPv4 take turns,
each `stagger_s` after the one before, so that a dead address delays nobody (RFC 8305, happy eyeballs).
Simultaneous dialling starts soon after; the relay later, and it waits a little for something better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal, TypeAlias

from ravnest.core.config import config, require
from ravnest.core.ids import check_id
from ravnest.net.addresses import Address, check_address, is_near, is_public, show
from ravnest.net.punch import CAN_PUNCH
from ravnest.net.tunnel import RelayInfo

__all__ = ["Here", "How", "PeerInfo", "ReachConfig", "Way", "advise", "choose_ways", "order_addresses", "tell_failures"]

How: TypeAlias = Literal["direct", "punched", "relayed"]

_MAX_ADDRESSES = 16


@config
class Here:
    """Where this node is: the addresses it has itself, and where the coordinator sees it."""

    addresses: tuple[Address, ...] = ()
    observed: Address | None = None

    def __post_init__(self) -> None:
        _check_addresses(self.addresses, self.observed)


@config
class PeerInfo:
    """Where a peer may be, as the coordinator tells it; `purpose` tells apart links to the same peer."""

    name: str
    addresses: tuple[Address, ...] = ()
    observed: Address | None = None
    punch: bool = True
    relay: RelayInfo | None = None
    purpose: str = "link"

    def __post_init__(self) -> None:
        check_id(self.name)
        _check_addresses(self.addresses, self.observed)


@config
class ReachConfig:
    """When the ways are tried, counted from the start, and for how long at a time."""

    stagger_s: float = 0.25
    punch_after_s: float = 0.2
    relay_after_s: float = 0.5
    settle_s: float = 1.5
    """How long a relayed connection waits for a better one before it is chosen."""
    try_s: float = 5.0
    punch_try_s: float = 2.0
    retry_s: float = 0.1
    max_retry_s: float = 2.0
    confirm_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("stagger_s", "punch_after_s", "relay_after_s", "settle_s"):
            require(getattr(self, name) >= 0, f"{name} must be 0 seconds or more")
        for name in ("try_s", "punch_try_s", "retry_s", "confirm_s"):
            require(getattr(self, name) > 0, f"{name} must be more than 0 seconds")
        require(self.max_retry_s >= self.retry_s, "max_retry_s must be at least retry_s")


@dataclass(frozen=True)
class Way:
    """One way to try, for the first time after `after_s`."""

    how: How
    address: Address
    after_s: float

    def __str__(self) -> str:
        return f"{self.how} {show(self.address)}"


def choose_ways(peer: PeerInfo, here: Here, config: ReachConfig) -> list[Way]:
    """All that is worth trying, in the order of its beginning."""
    addresses = order_addresses(peer, here)
    ways = [Way("direct", address, i * config.stagger_s) for i, address in enumerate(addresses)]
    if peer.punch and CAN_PUNCH and peer.observed is not None:
        ways.append(Way("punched", peer.observed, config.punch_after_s))
    if peer.relay is not None:
        ways.append(Way("relayed", peer.relay.address, config.relay_after_s))
    return sorted(ways, key=lambda way: way.after_s)


def order_addresses(peer: PeerInfo, here: Here) -> list[Address]:
    """The peer's addresses, the most promising first."""
    known = list(dict.fromkeys([*peer.addresses, *([peer.observed] if peer.observed else [])]))
    groups: dict[int, list[Address]] = {}
    for address in known[:_MAX_ADDRESSES]:
        groups.setdefault(_rank(address, peer, here), []).append(address)
    return [address for rank in sorted(groups) for address in _take_turns(groups[rank])]


def advise(how: How, peer: str, port: int, here: Here) -> str:
    """What would make the link better; nothing when it is as good as it gets."""
    if how == "direct":
        return ""
    host = here.addresses[0][0] if here.addresses else "this PC"
    forward = f"forward TCP port {port} of your router to {show((host, port))}, or have the same done for {peer}"
    if how == "punched":
        return f"it works, and may not after a router restarts: to be sure, {forward}"
    return f"all goes through the coordinator's line: to make it direct, {forward}"


def tell_failures(failures: Mapping[str, str]) -> str:
    """Why each way did not work, in one line."""
    return "; ".join(f"{way}: {reason}" for way, reason in failures.items()) or "no way was tried"


def _rank(address: Address, peer: PeerInfo, here: Here) -> int:
    same_home = here.observed is not None and peer.observed is not None and here.observed[0] == peer.observed[0]
    near = any(is_near(address[0], mine) for mine, _ in here.addresses)
    if (near or same_home) and address != peer.observed:
        return 0
    return 1 if is_public(address[0]) or address == peer.observed else 2


def _take_turns(addresses: Iterable[Address]) -> list[Address]:
    ipv6: list[Address] = []
    ipv4: list[Address] = []
    for address in addresses:
        (ipv6 if ":" in address[0] else ipv4).append(address)
    return [address for address in chain.from_iterable(zip_longest(ipv6, ipv4)) if address is not None]


def _check_addresses(addresses: tuple[Address, ...], observed: Address | None) -> None:
    for address in (*addresses, *([observed] if observed else [])):
        check_address(address)
