"""Tickets: everything that a PC needs to join a run, as one string to copy and send.

    rav1-BASE32(fingerprint 32 | token 16 | number of addresses 1 | addresses | checksum 4)

The fingerprint identifies the coordinator before anything is sent; the token is the invitation. An address is a kind
(4, 6 or a name), its bytes and a port. The checksum detects a character that was copied wrong.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re
import secrets
import struct

from ravnest.core.config import config, require
from ravnest.transport.address import Address

__all__ = ["Ticket", "new_token"]

_PREFIX = "rav1-"
_FINGERPRINT_BYTES, _TOKEN_BYTES, _CHECKSUM_BYTES = 32, 16, 4
_MAX_ADDRESSES = 16
_MAX_CHARS = 8000
_NAME, _IPV4, _IPV6 = 0, 4, 6
_PACKED_BYTES = {_IPV4: 4, _IPV6: 16}
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_TYPO = "ticket is incomplete or has a wrong character: copy all of it again"


def new_token() -> str:
    """Draw 128 random bits, in hexadecimal."""
    return secrets.token_hex(_TOKEN_BYTES)


@config
class Ticket:
    """The coordinator's addresses (tried in this order), its fingerprint, and the invitation."""

    addresses: tuple[Address, ...]
    fingerprint: str
    token: str

    def __post_init__(self) -> None:
        require(
            1 <= len(self.addresses) <= _MAX_ADDRESSES,
            f"ticket must have 1 to {_MAX_ADDRESSES} addresses, got {len(self.addresses)}",
        )
        for host, port in self.addresses:
            is_host = _packed(host) is not None or _HOST.fullmatch(host)
            require(bool(is_host), f"{host!r} is neither a host name nor an IP address")
            require(0 < port < 2**16, f"port of {host} must be between 1 and 65535, got {port}")
        _check_hex(self.fingerprint, _FINGERPRINT_BYTES, "fingerprint of a ticket")
        _check_hex(self.token, _TOKEN_BYTES, "token of a ticket")

    def __str__(self) -> str:
        body = bytes.fromhex(self.fingerprint) + bytes.fromhex(self.token) + bytes([len(self.addresses)])
        body += b"".join(_encode_address(address) for address in self.addresses)
        text = base64.b32encode(body + _checksum(body)).decode().rstrip("=")
        return _PREFIX + text.lower()

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Decode the ticket in `text`; surrounding white space is ignored."""
        text = text.strip().lower()
        if not text.startswith(_PREFIX):
            version = re.match(r"rav(\d+)-", text)
            require(version is None, "ticket is from another version of Ravnest: install the version that made it")
            raise ValueError(f"a ticket begins with {_PREFIX}: copy it as the coordinator printed it")
        body = _decode(text.removeprefix(_PREFIX))
        reader = _Reader(body)
        fingerprint, token = reader.take(_FINGERPRINT_BYTES).hex(), reader.take(_TOKEN_BYTES).hex()
        addresses = tuple(reader.take_address() for _ in range(reader.take_byte()))
        require(reader.is_empty, _TYPO)
        return cls(addresses=addresses, fingerprint=fingerprint, token=token)


class _Reader:
    """Reads the bytes of a ticket in order."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_empty(self) -> bool:
        return self._at == len(self._data)

    def take(self, num_bytes: int) -> bytes:
        require(self._at + num_bytes <= len(self._data), _TYPO)
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def take_byte(self) -> int:
        return self.take(1)[0]

    def take_address(self) -> Address:
        kind = self.take_byte()
        if kind in _PACKED_BYTES:
            host = str(ipaddress.ip_address(self.take(_PACKED_BYTES[kind])))
        else:
            require(kind == _NAME, _TYPO)
            host = self.take(self.take_byte()).decode("ascii", errors="replace")
        (port,) = struct.unpack("!H", self.take(2))
        return host, port


def _encode_address(address: Address) -> bytes:
    host, port = address
    packed = _packed(host)
    if packed is not None and str(ipaddress.ip_address(packed)) == host:
        kind = _IPV4 if len(packed) == _PACKED_BYTES[_IPV4] else _IPV6
        body = bytes([kind]) + packed
    else:
        name = host.encode("ascii")
        body = bytes([_NAME, len(name)]) + name
    return body + struct.pack("!H", port)


def _packed(host: str) -> bytes | None:
    """Bytes of a numeric address; None for a name, or for an IPv6 address with a zone."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return None if "%" in host else address.packed


def _decode(chars: str) -> bytes:
    """Decode and return the bytes before the checksum; rejects a wrong checksum and non-canonical base32."""
    require(len(chars) <= _MAX_CHARS, f"ticket has {len(chars)} characters, the limit is {_MAX_CHARS}")
    try:
        data = base64.b32decode(chars.upper() + "=" * (-len(chars) % 8))
    except (binascii.Error, ValueError):
        raise ValueError(_TYPO) from None
    is_canonical = base64.b32encode(data).decode().rstrip("=").lower() == chars
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    require(is_canonical and _checksum(body) == checksum, _TYPO)
    return body


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(_PREFIX.encode() + body).digest()[:_CHECKSUM_BYTES]


def _check_hex(text: str, num_bytes: int, what: str) -> None:
    is_valid = re.fullmatch(rf"[0-9a-f]{{{2 * num_bytes}}}", text) is not None
    require(is_valid, f"{what} must be {2 * num_bytes} characters of 0-9 and a-f, got {len(text)}: {text[:20]!r}")
