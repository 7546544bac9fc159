"""Where nodes are, as they tell each other through the coordinator."""

from __future__ import annotations

import msgspec

from .config import require
from .ids import check_id

__all__ = ["Peer", "Whereabouts"]

_MOST_ADDRESSES = 16


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A strict record."""


class Whereabouts(_Record, frozen=True):
    """Where a node's door is: the addresses it has itself, and where the coordinator sees it."""

    addresses: tuple[tuple[str, int], ...] = ()
    observed: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        require(len(self.addresses) <= _MOST_ADDRESSES, f"a node has at most {_MOST_ADDRESSES} addresses")


class Peer(_Record, frozen=True, kw_only=True):
    """A neighbour, where it may be, and the pair's token at the relay (which is the coordinator)."""

    name: str
    where: Whereabouts
    relay_token: str

    def __post_init__(self) -> None:
        check_id(self.name)
