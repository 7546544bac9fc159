"""What a worker of a fleet has, whatever its part is: its identity, its door, and what the PC's owner lends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.control import Peer, Whereabouts
from ..net.addresses import Address
from ..net.door import Door
from ..net.identity import Identity
from ..net.link import LinkConfig
from ..net.pace import Pace
from ..net.reach import Reached
from ..net.tunnel import RelayInfo
from ..net.ways import Here, PeerInfo
from .shelf import Shelf

__all__ = ["Lent"]


@dataclass(frozen=True)
class Lent:
    """`expect(what, names)` lets these nodes in for something, besides the neighbours; no names: nobody any more."""

    identity: Identity
    door: Door
    where: Callable[[], Whereabouts]
    memory_bytes: int
    threads: int
    expect: Callable[[str, Sequence[str]], None]
    shelf: Shelf
    pace: Pace | None = None

    def reach(
        self, peer: Peer, purpose: str, config: LinkConfig, *, coordinator: Address, deadline_s: float
    ) -> Reached:
        """A link to a node, who must call this one too."""
        info = PeerInfo(
            name=peer.name,
            addresses=peer.where.addresses,
            observed=peer.where.observed,
            relay=RelayInfo(address=coordinator, token=peer.relay_token),
            purpose=purpose,
        )
        here = self.where()
        return self.door.reach(
            info, config, here=Here(addresses=here.addresses, observed=here.observed), deadline_s=deadline_s
        )
