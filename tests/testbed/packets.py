"""Packets as a host's kernel would hand them to the forwarder, and their checksums made from scratch."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address

TCP, UDP, ICMP = 6, 17, 1
NO_NOTE = bytes(10)


def make(
    protocol: int, source: tuple[str, int], target: tuple[str, int], payload: bytes = b"", *, unfinished: bool = False
) -> bytes:
    """A whole packet; `unfinished`: with the note that its checksum is left to be made."""
    addresses = IPv4Address(source[0]).packed + IPv4Address(target[0]).packed
    if protocol == TCP:
        body = struct.pack("!HHIIBBHHH", source[1], target[1], 1, 2, 0x50, 0x10, 1000, 0, 0) + payload
        at = 16
    elif protocol == UDP:
        body = struct.pack("!HHHH", source[1], target[1], 8 + len(payload), 0) + payload
        at = 6
    else:
        body = struct.pack("!BBHHH", 8, 0, 0, source[1], 1) + payload
        at = 2
    pseudo = b"" if protocol == ICMP else addresses + struct.pack("!HH", protocol, len(body))
    checksum = total(pseudo) if unfinished else 0xFFFF - total(pseudo + body)
    body = body[:at] + checksum.to_bytes(2, "big") + body[at + 2 :]
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 7, 0x4000, 64, protocol, 0) + addresses
    header = header[:10] + (0xFFFF - total(header)).to_bytes(2, "big") + header[12:]
    note = struct.pack("=BBHHHH", 1, 0, 0, 0, 20, at) if unfinished else NO_NOTE
    return note + header + body


def total(data: bytes) -> int:
    """The ones' complement sum of 16-bit words."""
    padded = data + bytes(len(data) % 2)
    value: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while value > 0xFFFF:
        value = (value & 0xFFFF) + (value >> 16)
    return value
