"""The NAT of a home router, as Linux does it: outgoing flows create mappings, and only answers to them get in.

A mapping is (protocol, inner address and port, outer address and port); outside, the router's address replaces the
inner one. A `plain` NAT keeps the port unless another PC of the home uses it towards the same peer, so the port that a
third party observes is the one that a peer can dial, and hole punching works between two such NATs. A `symmetric` NAT
takes a new port for every mapping, which a peer cannot predict: peers behind two of them need a relay.

Packets from outside without a mapping are silently dropped.
"""

from __future__ import annotations

from testbed.packet import flow_of, rewrite_destination, rewrite_source

__all__ = ["Nat"]

_FIRST_PORT, _LAST_PORT = 32_768, 65_535

InnerKey = tuple[int, bytes, int, bytes, int]  # protocol, inner address, inner port, outer address, outer port
OuterKey = tuple[int, int, bytes, int]  # protocol, port of the router, outer address, outer port


class Nat:
    """The mappings of one home."""

    def __init__(self, address: bytes, *, symmetric: bool = False, max_mappings: int = 32_768) -> None:
        self.address, self._max_mappings = address, max_mappings
        self._symmetric = symmetric
        self._next_port = _FIRST_PORT
        self._ports: dict[InnerKey, int] = {}
        self._inner_keys: dict[OuterKey, InnerKey] = {}

    def translate_outbound(self, packet: bytearray) -> bool:
        """Rewrite the source of a packet to the router's address; False if it cannot be translated."""
        flow = flow_of(packet)
        if flow is None:
            return False
        inner: InnerKey = (flow.protocol, flow.source, flow.source_port, flow.destination, flow.destination_port)
        port = self._ports.get(inner)
        if port is None:
            port = self._add(inner)
        rewrite_source(packet, self.address, port)
        return True

    def translate_inbound(self, packet: bytearray) -> bytes | None:
        """Rewrite the destination of a packet to a PC of the home and return its address; None without a mapping."""
        flow = flow_of(packet)
        if flow is None:
            return None
        inner = self._inner_keys.get((flow.protocol, flow.destination_port, flow.source, flow.source_port))
        if inner is None:
            return None
        rewrite_destination(packet, inner[1], inner[2])
        return inner[1]

    def _add(self, inner: InnerKey) -> int:
        if len(self._ports) >= self._max_mappings:
            self._remove(next(iter(self._ports)))
        protocol, _, inner_port, outer, outer_port = inner
        port = self._new_port() if self._symmetric else inner_port
        while (protocol, port, outer, outer_port) in self._inner_keys:
            port = self._new_port()
        self._ports[inner] = port
        self._inner_keys[protocol, port, outer, outer_port] = inner
        return port

    def _remove(self, inner: InnerKey) -> None:
        protocol, _, _, outer, outer_port = inner
        del self._inner_keys[protocol, self._ports.pop(inner), outer, outer_port]

    def _new_port(self) -> int:
        port = self._next_port
        self._next_port = port + 1 if port < _LAST_PORT else _FIRST_PORT
        return port
