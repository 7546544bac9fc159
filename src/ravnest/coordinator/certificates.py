"""The coordinator's certificate authority, and the identity of connections.

All files are in one persistent directory, so that nodes recognise a restarted coordinator:

    authority/     the signing key and its certificate, whose fingerprint is in every ticket
    coordinator/   the identity that the coordinator presents to nodes
    requester/     the identity that commands of this user present to the coordinator (`ravnest kick`)

Keys are readable by this user only.
"""

from __future__ import annotations

import asyncio
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ravnest.core.ids import COORDINATOR
from ravnest.errors import IdentityError
from ravnest.transport.address import plain_host, show
from ravnest.transport.identity import Authority, Identity, fingerprint, make_authority, make_key, make_request
from ravnest.transport.identity import save_identity as save

__all__ = ["REQUESTER", "CertificateAuthority", "address_of", "is_local", "name_of", "requester_identity"]

REQUESTER = "requester"
RESERVED = (COORDINATOR, REQUESTER)

_AUTHORITY_VALID, _NODE_VALID = timedelta(days=3650), timedelta(days=365)
_RENEW_BEFORE = timedelta(days=30)


class CertificateAuthority:
    """The authority of one coordinator, created on first use and stored in `directory`."""

    def __init__(self, directory: Path, now: datetime | None = None) -> None:
        now = now or datetime.now(UTC)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._authority = _authority(directory / "authority", now)
        self.fingerprint = fingerprint(self._authority.certificate_pem)
        self.identity = self._identity(directory / COORDINATOR, COORDINATOR, now)
        self._identity(directory / REQUESTER, REQUESTER, now)

    @property
    def authority_pem(self) -> bytes:
        return self._authority.certificate_pem

    def sign(self, request_pem: bytes, name: str, now: datetime | None = None) -> bytes:
        """A certificate for the key of a signing request; raises `IdentityError`."""
        if name in RESERVED:
            raise IdentityError(f"the name {name!r} is reserved: choose another")
        return self._authority.sign(request_pem, name, now=now or datetime.now(UTC), valid=_NODE_VALID)

    def _identity(self, directory: Path, name: str, now: datetime) -> Identity:
        try:
            identity = Identity.load(directory)
            if identity.is_of(self.authority_pem) and identity.valid_until() > now + _RENEW_BEFORE:
                return identity
        except IdentityError:
            pass  # missing or invalid: create a new one
        key = make_key()
        certificate = self._authority.sign(make_request(key, name), name, now=now, valid=_NODE_VALID)
        return save(directory, key, certificate, self.authority_pem)


def requester_identity(directory: Path) -> Identity:
    """The identity of the requester, from the coordinator's `directory`."""
    return Identity.load(directory / REQUESTER)


def _authority(directory: Path, now: datetime) -> Authority:
    if not directory.exists():
        made = make_authority("ravnest coordinator", now=now, valid=_AUTHORITY_VALID)
        made.save(directory)
    return Authority.load(directory)


def is_local(transport: asyncio.BaseTransport | None) -> bool:
    """Return whether a connection came by a unix socket, which only processes of this user can reach."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    return sock is not None and hasattr(socket, "AF_UNIX") and sock.family == socket.AF_UNIX


def name_of(transport: asyncio.BaseTransport | None) -> str | None:
    """The name in the client certificate of a connection, which TLS has verified; None without one."""
    certificate: dict[str, Any] = (transport.get_extra_info("peercert") if transport is not None else None) or {}
    names = [value for part in certificate.get("subject", ()) for field, value in part if field == "commonName"]
    return str(names[0]) if len(names) == 1 else None


def address_of(transport: asyncio.BaseTransport | None) -> str:
    """The remote address of a connection, for logs."""
    at = transport.get_extra_info("peername") if transport is not None else None
    return show((plain_host(at[0]), at[1])) if at else "unknown address"
