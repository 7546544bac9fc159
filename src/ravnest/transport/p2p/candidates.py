"""Candidates to reach a peer: their selection, order and start times, and the description of the outcome.

Addresses in the same network come first, then public ones, then the rest; IPv6 and IPv4 alternate, each `stagger_s`
after the previous one, so that a dead address delays no other (RFC 8305, Happy Eyeballs). Hole punching starts soon
after, the relay later; a relayed connection waits a little for a better one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal, TypeAlias

from ravnest.core.config import config, require
from ravnest.core.ids import check_id
from ravnest.transport.address import Address, check_address, is_near, is_public, show
from ravnest.transport.p2p.hole_punching import CAN_PUNCH
from ravnest.transport.p2p.relay_client import RelayInfo

__all__ = [
    "Candidate",
    "ConnectionType",
    "ConnectorConfig",
    "LocalCandidates",
    "PeerCandidates",
    "describe_failures",
    "gather_candidates",
    "improvement_hint",
    "order_addresses",
]

ConnectionType: TypeAlias = Literal["direct", "punched", "relayed"]

_MAX_ADDRESSES = 16


@config
class LocalCandidates:
    """This node's own addresses, and its address as the coordinator observes it."""

    addresses: tuple[Address, ...] = ()
    observed: Address | None = None

    def __post_init__(self) -> None:
        _check_addresses(self.addresses, self.observed)


@config
class PeerCandidates:
    """A peer's addresses, as reported by the coordinator; `purpose` distinguishes links to the same peer."""

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
class ConnectorConfig:
    """Times of connectivity checks; `..._after_s` count from the start of the connector."""

    stagger_s: float = 0.25
    punch_after_s: float = 0.2
    relay_after_s: float = 0.5
    settle_s: float = 1.5
    """Time that a relayed connection waits for a better one before it is nominated."""
    check_timeout_s: float = 5.0
    punch_timeout_s: float = 2.0
    retry_s: float = 0.1
    max_retry_s: float = 2.0
    nomination_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("stagger_s", "punch_after_s", "relay_after_s", "settle_s"):
            require(getattr(self, name) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("check_timeout_s", "punch_timeout_s", "retry_s", "nomination_timeout_s"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")
        require(
            self.max_retry_s >= self.retry_s, f"max_retry_s must be >= retry_s ({self.retry_s}), got {self.max_retry_s}"
        )


@dataclass(frozen=True)
class Candidate:
    """One address to check, for the first time after `after_s`."""

    kind: ConnectionType
    address: Address
    after_s: float

    def __str__(self) -> str:
        return f"{self.kind} {show(self.address)}"


def gather_candidates(peer: PeerCandidates, local: LocalCandidates, config: ConnectorConfig) -> list[Candidate]:
    """List all candidates of a peer in the order in which their checks start."""
    addresses = order_addresses(peer, local)
    candidates = [Candidate("direct", address, i * config.stagger_s) for i, address in enumerate(addresses)]
    if peer.punch and CAN_PUNCH and peer.observed is not None:
        candidates.append(Candidate("punched", peer.observed, config.punch_after_s))
    if peer.relay is not None:
        candidates.append(Candidate("relayed", peer.relay.address, config.relay_after_s))
    return sorted(candidates, key=lambda candidate: candidate.after_s)


def order_addresses(peer: PeerCandidates, local: LocalCandidates) -> list[Address]:
    """Sort the peer's addresses, the most promising first."""
    known = list(dict.fromkeys([*peer.addresses, *([peer.observed] if peer.observed else [])]))
    groups: dict[int, list[Address]] = {}
    for address in known[:_MAX_ADDRESSES]:
        groups.setdefault(_rank(address, peer, local), []).append(address)
    return [address for rank in sorted(groups) for address in _alternate(groups[rank])]


def improvement_hint(kind: ConnectionType, peer: str, port: int, local: LocalCandidates) -> str:
    """Advice to the user for a better connection; empty if it is direct."""
    if kind == "direct":
        return ""
    host = local.addresses[0][0] if local.addresses else "this PC"
    forward = f"forward TCP port {port} of your router to {show((host, port))}, or do the same for {peer}"
    if kind == "punched":
        return f"this connection may fail after a router restarts; to prevent that, {forward}"
    return f"all traffic goes through the coordinator; for a direct connection, {forward}"


def describe_failures(failures: Mapping[str, str]) -> str:
    """Join the failure of each candidate into one line."""
    return "; ".join(f"{candidate}: {reason}" for candidate, reason in failures.items()) or "no candidate was checked"


def _rank(address: Address, peer: PeerCandidates, local: LocalCandidates) -> int:
    same_nat = local.observed is not None and peer.observed is not None and local.observed[0] == peer.observed[0]
    is_lan = any(is_near(address[0], mine) for mine, _ in local.addresses)
    if (is_lan or same_nat) and address != peer.observed:
        return 0
    return 1 if is_public(address[0]) or address == peer.observed else 2


def _alternate(addresses: Iterable[Address]) -> list[Address]:
    ipv6: list[Address] = []
    ipv4: list[Address] = []
    for address in addresses:
        (ipv6 if ":" in address[0] else ipv4).append(address)
    return [address for address in chain.from_iterable(zip_longest(ipv6, ipv4)) if address is not None]


def _check_addresses(addresses: tuple[Address, ...], observed: Address | None) -> None:
    for address in (*addresses, *([observed] if observed else [])):
        check_address(address)
