"""Network addresses as values: how they are written, and which of them belong together."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address, ip_network
from typing import TypeAlias

from ravnest.core.config import require

__all__ = ["Address", "check_address", "home_of", "is_near", "is_public", "plain_host", "show"]

Address: TypeAlias = tuple[str, int]
"""A host and a TCP port."""

_HOME_BITS = {4: 32, 6: 64}
_NEAR_BITS = {4: 24, 6: 64}


def check_address(address: Address) -> Address:
    """Return `address` if it is a numeric one with a port, else say what it should look like."""
    host, port = address
    ip_address(host)  # says so itself
    require(0 < port < 2**16, f"{port} is not a port: it is 1 to 65535")
    return address


def show(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(host: str) -> str:
    """An IPv4 address that arrived on an IPv6 socket, as IPv4; an IPv6 one without its zone."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def home_of(host: str) -> str:
    """What counts as one guest: an IPv6 home has 2**64 addresses, an IPv4 one has one."""
    return _network(host, _HOME_BITS)


def is_near(one: str, other: str) -> bool:
    """Whether two hosts are probably in the same local network."""
    return _network(one, _NEAR_BITS) == _network(other, _NEAR_BITS)


def is_public(host: str) -> bool:
    return ip_address(host).is_global


def _network(host: str, bits: dict[int, int]) -> str:
    return str(ip_network((host, bits[ip_address(host).version]), strict=False))
