"""An IPv4 packet as a TUN device hands it over, and what address translation changes in it.

The first ten bytes are the kernel's note on work it left to the network card: a checksum that is not yet made, a
segment that is still to be cut into packets (up to 64 KB of TCP in one piece, which is why Python keeps up). The note
goes on to the receiver as it is; the bytes that the wire would have carried are counted by `wire_bytes`.

Checksums are ones' complement sums of 16-bit words, so a changed word changes them by the difference (RFC 1624):

    new = ~(~old + ~before + after)
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = [
    "NOTE", "Ends", "ends", "flip_bit", "is_acknowledgement",
    "rewrite_source", "rewrite_target", "target_of", "wire_bytes",
]  # fmt: skip

NOTE = 10  # bytes of struct virtio_net_hdr
_CHECKSUM_LEFT = 1  # flag: the checksum field holds the sum of the pseudo header only
_ICMP, _TCP, _UDP = 1, 6, 17
_CHECKSUM_AT = {_ICMP: 2, _TCP: 16, _UDP: 6}


class Ends(NamedTuple):
    """The two ends of a conversation; an ICMP echo has its identifier for a port on the side that asks."""

    protocol: int
    source: bytes
    source_port: int
    target: bytes
    target_port: int


def target_of(packet: bytes | bytearray) -> bytes | None:
    """The address that a packet goes to; None if it is not IPv4."""
    if len(packet) < NOTE + 20 or packet[NOTE] >> 4 != 4:
        return None
    return bytes(packet[NOTE + 16 : NOTE + 20])


def ends(packet: bytes | bytearray) -> Ends | None:
    """None for what no home router translates: fragments and other protocols than TCP, UDP and ICMP echo."""
    top = _top(packet)
    (fragment,) = struct.unpack_from("!H", packet, NOTE + 6)
    protocol = packet[NOTE + 9]
    if fragment & 0x3FFF or len(packet) < top + _CHECKSUM_AT.get(protocol, 0) + 2:
        return None
    source, target = bytes(packet[NOTE + 12 : NOTE + 16]), bytes(packet[NOTE + 16 : NOTE + 20])
    if protocol in (_TCP, _UDP):
        source_port, target_port = struct.unpack_from("!HH", packet, top)
        return Ends(protocol, source, source_port, target, target_port)
    if protocol == _ICMP and packet[top] in (0, 8) and len(packet) >= top + 8:
        (identifier,) = struct.unpack_from("!H", packet, top + 4)
        asks = packet[top] == 8
        return Ends(protocol, source, identifier if asks else 0, target, 0 if asks else identifier)
    return None


def rewrite_source(packet: bytearray, address: bytes, port: int) -> None:
    """Let a packet that `ends` understands come from another address and port."""
    _rewrite(packet, NOTE + 12, 0, address, port)


def rewrite_target(packet: bytearray, address: bytes, port: int) -> None:
    """Let a packet that `ends` understands go to another address and port."""
    _rewrite(packet, NOTE + 16, 2, address, port)


def wire_bytes(packet: bytes | bytearray) -> int:
    """What the packet, once cut into segments, is on the wire: every segment has the headers again."""
    size = len(packet) - NOTE
    if packet[1] == 0:  # nothing left to cut
        return size
    segment: int = struct.unpack_from("=H", packet, 4)[0]
    top = _top(packet)
    headers = top - NOTE + (packet[top + 12] >> 4) * 4 if packet[NOTE + 9] == _TCP else top - NOTE + 8
    num_segments = -(-(size - headers) // max(1, segment))
    return size + max(0, num_segments - 1) * headers


def is_acknowledgement(packet: bytes | bytearray) -> bool:
    """Whether it says nothing but that data has come: TCP without payload, neither a beginning nor an end."""
    size = len(packet) - NOTE
    if not 40 <= size <= 100 or packet[NOTE + 9] != _TCP:
        return False
    top = _top(packet)
    return size - (top - NOTE) == (packet[top + 12] >> 4) * 4 and packet[top + 13] & 0x07 == 0


def flip_bit(packet: bytearray, least_bytes: int) -> bool:
    """Change a bit of what a TCP packet carries, and its checksum with it, so that only the ends can notice.

    False: it carries less than `least_bytes`.
    """
    if packet[NOTE] >> 4 != 4 or packet[NOTE + 9] != _TCP or is_acknowledgement(packet):
        return False
    top = _top(packet)
    start = top + (packet[top + 12] >> 4) * 4
    if len(packet) - start < max(least_bytes, 2):
        return False
    at = start + (len(packet) - start) // 2
    at -= (at - top) % 2  # a whole word of the checksum
    before = bytes(packet[at : at + 2])
    packet[at] ^= 1
    if not packet[0] & _CHECKSUM_LEFT:  # else it is made when the packet arrives
        _adjust(packet, top + _CHECKSUM_AT[_TCP], before, bytes(packet[at : at + 2]))
    return True


def _top(packet: bytes | bytearray) -> int:
    """Where the header above IP starts."""
    return NOTE + (packet[NOTE] & 15) * 4


def _rewrite(packet: bytearray, address_at: int, port_offset: int, address: bytes, port: int) -> None:
    top, protocol = _top(packet), packet[NOTE + 9]
    port_at = top + (4 if protocol == _ICMP else port_offset)
    old_address, old_port = bytes(packet[address_at : address_at + 4]), bytes(packet[port_at : port_at + 2])
    new_port = port.to_bytes(2, "big")
    packet[address_at : address_at + 4] = address
    packet[port_at : port_at + 2] = new_port
    _adjust(packet, NOTE + 10, old_address, address)
    checksum_at = top + _CHECKSUM_AT[protocol]
    if protocol == _ICMP:
        _adjust(packet, checksum_at, old_port, new_port)
    elif packet[0] & _CHECKSUM_LEFT:  # no complement yet, and ports are not in the pseudo header
        packet[checksum_at : checksum_at + 2] = _sum(packet[checksum_at : checksum_at + 2], old_address, address)
    elif protocol != _UDP or packet[checksum_at : checksum_at + 2] != b"\0\0":  # a UDP packet may have none
        _adjust(packet, checksum_at, old_address + old_port, address + new_port)


def _adjust(packet: bytearray, at: int, before: bytes, after: bytes) -> None:
    packet[at : at + 2] = _complement(_sum(_complement(packet[at : at + 2]), before, after))


def _sum(start: bytes | bytearray, before: bytes, after: bytes) -> bytes:
    """`start` with the words of `before` taken out and those of `after` put in."""
    total = int.from_bytes(start, "big")
    for i in range(0, len(before), 2):
        total += (0xFFFF - (before[i] << 8 | before[i + 1])) + (after[i] << 8 | after[i + 1])
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total.to_bytes(2, "big")


def _complement(word: bytes | bytearray) -> bytes:
    return bytes((255 - word[0], 255 - word[1]))
