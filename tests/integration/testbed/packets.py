"""Builds packets as a host's kernel delivers them to the forwarder, with checksums computed from scratch."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address

TCP, UDP, ICMP = 6, 17, 1
EMPTY_VNET_HEADER = bytes(10)


def make(
    protocol: int,
    source: tuple[str, int],
    destination: tuple[str, int],
    payload: bytes = b"",
    *,
    partial: bool = False,
) -> bytes:
    """A complete packet; with `partial`, its virtio header says that the checksum is not computed yet."""
    addresses = IPv4Address(source[0]).packed + IPv4Address(destination[0]).packed
    if protocol == TCP:
        body = struct.pack("!HHIIBBHHH", source[1], destination[1], 1, 2, 0x50, 0x10, 1000, 0, 0) + payload
        at = 16
    elif protocol == UDP:
        body = struct.pack("!HHHH", source[1], destination[1], 8 + len(payload), 0) + payload
        at = 6
    else:
        body = struct.pack("!BBHHH", 8, 0, 0, source[1], 1) + payload
        at = 2
    pseudo = b"" if protocol == ICMP else addresses + struct.pack("!HH", protocol, len(body))
    checksum = total(pseudo) if partial else 0xFFFF - total(pseudo + body)
    body = body[:at] + checksum.to_bytes(2, "big") + body[at + 2 :]
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 7, 0x4000, 64, protocol, 0) + addresses
    header = header[:10] + (0xFFFF - total(header)).to_bytes(2, "big") + header[12:]
    vnet_header = struct.pack("=BBHHHH", 1, 0, 0, 0, 20, at) if partial else EMPTY_VNET_HEADER
    return vnet_header + header + body


def total(data: bytes) -> int:
    """The ones' complement sum of 16-bit words."""
    padded = data + bytes(len(data) % 2)
    value: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while value > 0xFFFF:
        value = (value & 0xFFFF) + (value >> 16)
    return value
