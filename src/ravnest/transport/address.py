"""Network addresses: validation, formatting and grouping by network."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address, ip_network
from typing import TypeAlias

from ravnest.core.config import require

__all__ = ["Address", "check_address", "home_of", "is_near", "is_public", "parse_address", "plain_host", "show"]

Address: TypeAlias = tuple[str, int]
"""A host and a TCP port."""

_SITE_BITS = {4: 32, 6: 64}
_LAN_BITS = {4: 24, 6: 64}


def check_address(address: Address) -> Address:
    """Return `address` if its host is numeric and its port valid; raise `ValueError` otherwise."""
    host, port = address
    ip_address(host)  # raises ValueError
    require(0 < port < 2**16, f"port must be between 1 and 65535, got {port}")
    return address


def parse_address(text: str, *, default_host: str = "") -> Address:
    """`"attic:7710"` -> ("attic", 7710); `"[::1]:7710"` -> ("::1", 7710); `":7710"` takes the default host."""
    host, colon, port = text.strip().rpartition(":")
    require(bool(colon) and port.isdecimal(), f"{text!r} is not an address: write HOST:PORT, such as 192.168.1.5:7710")
    require(int(port) < 2**16, f"{text!r}: a port is a number up to 65535")
    host = (host[1:-1] if host.startswith("[") and host.endswith("]") else host) or default_host
    require(bool(host), f"{text!r} has no host: write HOST:PORT")
    return host, int(port)


def show(address: Address) -> str:
    """Format as `host:port`, with brackets around an IPv6 host."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(host: str) -> str:
    """Normalize a host: IPv4-mapped IPv6 becomes IPv4, an IPv6 zone is removed."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def home_of(host: str) -> str:
    """Network of one subscriber, the unit of per-client limits: a /64 for IPv6, a single address for IPv4."""
    return _network(host, _SITE_BITS)


def is_near(one: str, other: str) -> bool:
    """Whether two hosts are probably in the same local network."""
    return _network(one, _LAN_BITS) == _network(other, _LAN_BITS)


def is_public(host: str) -> bool:
    return ip_address(host).is_global


def _network(host: str, bits: dict[int, int]) -> str:
    return str(ip_network((host, bits[ip_address(host).version]), strict=False))
