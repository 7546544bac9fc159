"""The NAT of a home router, as Linux does it: what the home sends is remembered, only answers to it get in.

A conversation is (protocol, inner address and port, outer address and port). Outside, the home's address stands for
the inner one. A `plain` NAT keeps the port if no other PC of the home uses it towards the same place, so the port that
a third party sees is the one that a peer can dial, and two such NATs can be punched. A `symmetric` NAT takes a new port
for every conversation; nobody outside can know it, and peers behind two of them need a relay.

What nobody in the home asked for is dropped without a word.
"""

from __future__ import annotations

from .packet import ends, rewrite_source, rewrite_target

__all__ = ["Nat"]

_FIRST_PORT, _LAST_PORT = 32_768, 65_535

Inside = tuple[int, bytes, int, bytes, int]  # protocol, inner address, inner port, outer address, outer port
Outside = tuple[int, int, bytes, int]  # protocol, port of the router, outer address, outer port


class Nat:
    """The conversations of one home."""

    def __init__(self, address: bytes, *, symmetric: bool = False, most_conversations: int = 32_768) -> None:
        self.address, self._most = address, most_conversations
        self._symmetric = symmetric
        self._next_port = _FIRST_PORT
        self._ports: dict[Inside, int] = {}
        self._insides: dict[Outside, Inside] = {}

    def outward(self, packet: bytearray) -> bool:
        """Let a packet of the home come from the router; False: it cannot be translated."""
        found = ends(packet)
        if found is None:
            return False
        inside: Inside = (found.protocol, found.source, found.source_port, found.target, found.target_port)
        port = self._ports.get(inside)
        if port is None:
            port = self._remember(inside)
        rewrite_source(packet, self.address, port)
        return True

    def inward(self, packet: bytearray) -> bytes | None:
        """Let a packet to the router go to the PC it is meant for, and say which; None: nobody asked for it."""
        found = ends(packet)
        if found is None:
            return None
        inside = self._insides.get((found.protocol, found.target_port, found.source, found.source_port))
        if inside is None:
            return None
        rewrite_target(packet, inside[1], inside[2])
        return inside[1]

    def _remember(self, inside: Inside) -> int:
        if len(self._ports) >= self._most:
            self._forget(next(iter(self._ports)))
        protocol, _, inner_port, outer, outer_port = inside
        port = self._fresh() if self._symmetric else inner_port
        while (protocol, port, outer, outer_port) in self._insides:
            port = self._fresh()
        self._ports[inside] = port
        self._insides[protocol, port, outer, outer_port] = inside
        return port

    def _forget(self, inside: Inside) -> None:
        protocol, _, _, outer, outer_port = inside
        del self._insides[protocol, self._ports.pop(inside), outer, outer_port]

    def _fresh(self) -> int:
        port = self._next_port
        self._next_port = port + 1 if port < _LAST_PORT else _FIRST_PORT
        return port
