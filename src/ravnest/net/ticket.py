"""A ticket: all that a PC needs to join a run, in one word to copy, send or read aloud.

    rav1-BASE32(fingerprint 32 | token 16 | number of addresses 1 | addresses | checksum 4)

The fingerprint says whom to trust, before anything is sent; the token says that one was invited. An address is a kind
(4, 6 or a name), its bytes and a port. The checksum finds a letter that was copied wrong.
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
from ravnest.net.addresses import Address

__all__ = ["Ticket", "new_token"]

_PREFIX = "rav1-"
_FINGERPRINT_BYTES, _TOKEN_BYTES, _CHECKSUM_BYTES = 32, 16, 4
_MAX_ADDRESSES = 16
_MAX_LETTERS = 8000
_NAME, _IPV4, _IPV6 = 0, 4, 6
_PACKED_BYTES = {_IPV4: 4, _IPV6: 16}
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_TYPO = "this is not a whole ticket: a letter is wrong or missing. Copy it again, all of it"


def new_token() -> str:
    """128 random bits, in hexadecimal: nobody guesses it."""
    return secrets.token_hex(_TOKEN_BYTES)


@config
class Ticket:
    """Where the coordinator is (tried in this order), how to know it, and the invitation."""

    addresses: tuple[Address, ...]
    fingerprint: str
    token: str

    def __post_init__(self) -> None:
        require(
            1 <= len(self.addresses) <= _MAX_ADDRESSES,
            f"a ticket has 1 to {_MAX_ADDRESSES} addresses, not {len(self.addresses)}",
        )
        for host, port in self.addresses:
            is_host = _packed(host) is not None or _HOST.fullmatch(host)
            require(bool(is_host), f"{host!r} is neither a host's name nor its address")
            require(0 < port < 2**16, f"the port {port} of {host} is not a number from 1 to 65535")
        _check_hex(self.fingerprint, _FINGERPRINT_BYTES, "the fingerprint of a ticket")
        _check_hex(self.token, _TOKEN_BYTES, "the token of a ticket")

    def __str__(self) -> str:
        body = bytes.fromhex(self.fingerprint) + bytes.fromhex(self.token) + bytes([len(self.addresses)])
        body += b"".join(_encode_address(address) for address in self.addresses)
        text = base64.b32encode(body + _checksum(body)).decode().rstrip("=")
        return _PREFIX + text.lower()

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """The ticket in `text`, whatever white space is around it."""
        text = text.strip().lower()
        if not text.startswith(_PREFIX):
            version = re.match(r"rav(\d+)-", text)
            require(version is None, "this ticket is of another version of Ravnest: install the one that made it")
            raise ValueError(f"a ticket begins with {_PREFIX}: copy it as the coordinator printed it")
        body = _decode(text.removeprefix(_PREFIX))
        reader = _Reader(body)
        fingerprint, token = reader.take(_FINGERPRINT_BYTES).hex(), reader.take(_TOKEN_BYTES).hex()
        addresses = tuple(reader.take_address() for _ in range(reader.take_byte()))
        require(reader.is_empty, _TYPO)
        return cls(addresses=addresses, fingerprint=fingerprint, token=token)


class _Reader:
    """The bytes of a ticket, from first to last."""

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
    """The bytes of a numeric address; None for a name, or for an address that needs an interface's name too."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return None if "%" in host else address.packed


def _decode(letters: str) -> bytes:
    """The bytes in front of the checksum, if it is right and they are written in the one way they can be."""
    require(len(letters) <= _MAX_LETTERS, f"a ticket has at most {_MAX_LETTERS} letters")
    try:
        data = base64.b32decode(letters.upper() + "=" * (-len(letters) % 8))
    except (binascii.Error, ValueError):
        raise ValueError(_TYPO) from None
    is_canonical = base64.b32encode(data).decode().rstrip("=").lower() == letters
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    require(is_canonical and _checksum(body) == checksum, _TYPO)
    return body


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(_PREFIX.encode() + body).digest()[:_CHECKSUM_BYTES]


def _check_hex(text: str, num_bytes: int, what: str) -> None:
    is_right = re.fullmatch(rf"[0-9a-f]{{{2 * num_bytes}}}", text) is not None
    require(is_right, f"{what} is {2 * num_bytes} letters of 0-9 and a-f, not {len(text)} of {text[:20]!r}")
