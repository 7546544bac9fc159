"""Reads and rewrites IPv4 packets as a TUN device delivers them.

The first ten bytes are the kernel's `virtio_net_hdr`, which describes work left to the network card: a checksum that is
not computed yet, a segment that is not split into packets yet (up to 64 KB of TCP at once, which is why Python keeps
up). The header is passed on to the receiver unchanged; `wire_bytes` counts the bytes that a real wire would carry.

Checksums are ones' complement sums of 16-bit words, so a changed word changes them by the difference (RFC 1624):

    new = ~(~old + ~before + after)
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = [
    "IP_OFFSET",
    "Flow",
    "flow_of",
    "flip_bit",
    "is_acknowledgement",
    "rewrite_source",
    "rewrite_destination",
    "destination_of",
    "wire_bytes",
]

IP_OFFSET = 10  # bytes of struct virtio_net_hdr
_NEEDS_CHECKSUM = 1  # flag: the checksum field holds the sum of the pseudo header only
_ICMP, _TCP, _UDP = 1, 6, 17
_CHECKSUM_AT = {_ICMP: 2, _TCP: 16, _UDP: 6}


class Flow(NamedTuple):
    """Protocol, addresses and ports; an ICMP echo has its identifier as the port of the side that sends the request."""

    protocol: int
    source: bytes
    source_port: int
    destination: bytes
    destination_port: int


def destination_of(packet: bytes | bytearray) -> bytes | None:
    """The destination address; None if the packet is not IPv4."""
    if len(packet) < IP_OFFSET + 20 or packet[IP_OFFSET] >> 4 != 4:
        return None
    return bytes(packet[IP_OFFSET + 16 : IP_OFFSET + 20])


def flow_of(packet: bytes | bytearray) -> Flow | None:
    """The flow of a packet; None for fragments and for protocols other than TCP, UDP and ICMP echo."""
    offset = _transport_offset(packet)
    (fragment,) = struct.unpack_from("!H", packet, IP_OFFSET + 6)
    protocol = packet[IP_OFFSET + 9]
    if fragment & 0x3FFF or len(packet) < offset + _CHECKSUM_AT.get(protocol, 0) + 2:
        return None
    source, destination = (
        bytes(packet[IP_OFFSET + 12 : IP_OFFSET + 16]),
        bytes(packet[IP_OFFSET + 16 : IP_OFFSET + 20]),
    )
    if protocol in (_TCP, _UDP):
        source_port, destination_port = struct.unpack_from("!HH", packet, offset)
        return Flow(protocol, source, source_port, destination, destination_port)
    if protocol == _ICMP and packet[offset] in (0, 8) and len(packet) >= offset + 8:
        (identifier,) = struct.unpack_from("!H", packet, offset + 4)
        is_request = packet[offset] == 8
        return Flow(protocol, source, identifier if is_request else 0, destination, 0 if is_request else identifier)
    return None


def rewrite_source(packet: bytearray, address: bytes, port: int) -> None:
    """Replace the source address and port of a packet that has a flow."""
    _rewrite(packet, IP_OFFSET + 12, 0, address, port)


def rewrite_destination(packet: bytearray, address: bytes, port: int) -> None:
    """Replace the destination address and port of a packet that has a flow."""
    _rewrite(packet, IP_OFFSET + 16, 2, address, port)


def wire_bytes(packet: bytes | bytearray) -> int:
    """The size on the wire, where the packet is split into segments with headers of their own."""
    size = len(packet) - IP_OFFSET
    if packet[1] == 0:  # no segmentation left to do
        return size
    segment: int = struct.unpack_from("=H", packet, 4)[0]
    offset = _transport_offset(packet)
    headers = (
        offset - IP_OFFSET + (packet[offset + 12] >> 4) * 4 if packet[IP_OFFSET + 9] == _TCP else offset - IP_OFFSET + 8
    )
    num_segments = -(-(size - headers) // max(1, segment))
    return size + max(0, num_segments - 1) * headers


def is_acknowledgement(packet: bytes | bytearray) -> bool:
    """Whether a packet is a bare TCP acknowledgement: no payload, and neither SYN, FIN nor RST."""
    size = len(packet) - IP_OFFSET
    if not 40 <= size <= 100 or packet[IP_OFFSET + 9] != _TCP:
        return False
    offset = _transport_offset(packet)
    return size - (offset - IP_OFFSET) == (packet[offset + 12] >> 4) * 4 and packet[offset + 13] & 0x07 == 0


def flip_bit(packet: bytearray, min_bytes: int) -> bool:
    """Flip a bit of a TCP packet's payload and adjust its checksum, so that TCP does not notice.

    Returns False if the payload has less than `min_bytes`.
    """
    if packet[IP_OFFSET] >> 4 != 4 or packet[IP_OFFSET + 9] != _TCP or is_acknowledgement(packet):
        return False
    offset = _transport_offset(packet)
    start = offset + (packet[offset + 12] >> 4) * 4
    if len(packet) - start < max(min_bytes, 2):
        return False
    at = start + (len(packet) - start) // 2
    at -= (at - offset) % 2  # aligned to a word of the checksum
    before = bytes(packet[at : at + 2])
    packet[at] ^= 1
    if not packet[0] & _NEEDS_CHECKSUM:  # otherwise it is computed on arrival
        _adjust(packet, offset + _CHECKSUM_AT[_TCP], before, bytes(packet[at : at + 2]))
    return True


def _transport_offset(packet: bytes | bytearray) -> int:
    """The offset of the transport header."""
    return IP_OFFSET + (packet[IP_OFFSET] & 15) * 4


def _rewrite(packet: bytearray, address_at: int, port_offset: int, address: bytes, port: int) -> None:
    offset, protocol = _transport_offset(packet), packet[IP_OFFSET + 9]
    port_at = offset + (4 if protocol == _ICMP else port_offset)
    old_address, old_port = bytes(packet[address_at : address_at + 4]), bytes(packet[port_at : port_at + 2])
    new_port = port.to_bytes(2, "big")
    packet[address_at : address_at + 4] = address
    packet[port_at : port_at + 2] = new_port
    _adjust(packet, IP_OFFSET + 10, old_address, address)
    checksum_at = offset + _CHECKSUM_AT[protocol]
    if protocol == _ICMP:
        _adjust(packet, checksum_at, old_port, new_port)
    elif packet[0] & _NEEDS_CHECKSUM:  # no complement yet, and ports are not in the pseudo header
        packet[checksum_at : checksum_at + 2] = _sum(packet[checksum_at : checksum_at + 2], old_address, address)
    elif protocol != _UDP or packet[checksum_at : checksum_at + 2] != b"\0\0":  # a UDP packet may have no checksum
        _adjust(packet, checksum_at, old_address + old_port, address + new_port)


def _adjust(packet: bytearray, at: int, before: bytes, after: bytes) -> None:
    packet[at : at + 2] = _complement(_sum(_complement(packet[at : at + 2]), before, after))


def _sum(start: bytes | bytearray, before: bytes, after: bytes) -> bytes:
    """The sum `start` with the words of `before` removed and those of `after` added."""
    total = int.from_bytes(start, "big")
    for i in range(0, len(before), 2):
        total += (0xFFFF - (before[i] << 8 | before[i + 1])) + (after[i] << 8 | after[i + 1])
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total.to_bytes(2, "big")


def _complement(word: bytes | bytearray) -> bytes:
    return bytes((255 - word[0], 255 - word[1]))
