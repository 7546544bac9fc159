"""Addresses of nodes, as the coordinator passes them from one to another."""

from __future__ import annotations

from ravnest.core.config import Record, require
from ravnest.core.ids import check_id

__all__ = ["Peer", "PeerAddresses"]

_MAX_ADDRESSES = 16
_MAX_HOST = 64


class PeerAddresses(Record, frozen=True):
    """Addresses of a node's endpoint: its own, and the one that the coordinator observes.

    Nodes with the same non-empty `host` run on one machine for one user and reach each other by unix socket.
    """

    addresses: tuple[tuple[str, int], ...] = ()
    observed: tuple[str, int] | None = None
    host: str = ""

    def __post_init__(self) -> None:
        require(
            len(self.addresses) <= _MAX_ADDRESSES,
            f"at most {_MAX_ADDRESSES} addresses are allowed, got {len(self.addresses)}",
        )
        require(len(self.host) <= _MAX_HOST, f"host must have at most {_MAX_HOST} characters, got {len(self.host)}")


class Peer(Record, frozen=True, kw_only=True):
    """A neighbour, its addresses, and the pair's token at the relay, which the coordinator runs."""

    name: str
    addresses: PeerAddresses
    relay_token: str

    def __post_init__(self) -> None:
        check_id(self.name)
