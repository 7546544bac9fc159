"""Who may come in: the coordinator's authority, the certificates it gives, and whom a connection belongs to.

All of it is in one directory that is kept, so that nodes find the same coordinator again after it was restarted:

    authority/     the key that signs, and its certificate, whose fingerprint is in every ticket
    coordinator/   what the coordinator shows to nodes
    requester/     what commands of this user show to the coordinator (`ravnest kick`), and nobody else has

Keys are readable by this user only.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ..core.errors import IdentityError
from ..net.addresses import plain_host, show
from ..net.identity import Authority, Identity, fingerprint, make_authority, make_key, make_request
from ..net.identity import save_identity as save

__all__ = ["COORDINATOR", "REQUESTER", "RESERVED", "People", "address_of", "name_of", "requester_identity"]

COORDINATOR, REQUESTER = "coordinator", "requester"
RESERVED = (COORDINATOR, REQUESTER)

_AUTHORITY_VALID, _NODE_VALID = timedelta(days=3650), timedelta(days=365)
_RENEW_BEFORE = timedelta(days=30)


class People:
    """The authority of one coordinator, made at first and kept in `directory`."""

    def __init__(self, directory: Path, now: datetime | None = None) -> None:
        now = now or datetime.now(UTC)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._authority = _authority(directory / "authority", now)
        self.fingerprint = fingerprint(self._authority.certificate_pem)
        self.identity = self._own(directory / COORDINATOR, COORDINATOR, now)
        self._own(directory / REQUESTER, REQUESTER, now)

    @property
    def authority_pem(self) -> bytes:
        return self._authority.certificate_pem

    def sign(self, request_pem: bytes, name: str, now: datetime | None = None) -> bytes:
        """A certificate that names the holder of the request's key; raises `IdentityError`."""
        if name in RESERVED:
            raise IdentityError(f"no node is called {name}")
        return self._authority.sign(request_pem, name, now=now or datetime.now(UTC), valid=_NODE_VALID)

    def _own(self, directory: Path, name: str, now: datetime) -> Identity:
        try:
            identity = Identity.load(directory)
            if identity.is_of(self.authority_pem) and identity.valid_until() > now + _RENEW_BEFORE:
                return identity
        except IdentityError:
            pass  # not there yet, or of no use: a new one is made
        key = make_key()
        certificate = self._authority.sign(make_request(key, name), name, now=now, valid=_NODE_VALID)
        return save(directory, key, certificate, self.authority_pem)


def requester_identity(directory: Path) -> Identity:
    """What shows the coordinator that keeps its files in `directory` that this user is its requester."""
    return Identity.load(directory / REQUESTER)


def _authority(directory: Path, now: datetime) -> Authority:
    if not directory.exists():
        made = make_authority("ravnest coordinator", now=now, valid=_AUTHORITY_VALID)
        made.save(directory)
    return Authority.load(directory)


def name_of(transport: asyncio.BaseTransport | None) -> str | None:
    """The name in the certificate with which a connection was made; None without one. TLS has checked it."""
    found: dict[str, Any] = (transport.get_extra_info("peercert") if transport is not None else None) or {}
    names = [value for part in found.get("subject", ()) for field, value in part if field == "commonName"]
    return str(names[0]) if len(names) == 1 else None


def address_of(transport: asyncio.BaseTransport | None) -> str:
    """Where a connection comes from, for people to read."""
    at = transport.get_extra_info("peername") if transport is not None else None
    return show((plain_host(at[0]), at[1])) if at else "somebody who left"
