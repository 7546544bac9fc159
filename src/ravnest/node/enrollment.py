"""Enroll with a ticket: authenticate the coordinator first, then get a certificate from it.

1. Fetch the authority's certificate from the server. Without the ticket's fingerprint, nothing more is sent to it.
2. Over a connection that only a coordinator of that authority can accept, send the token and a signing request, and
   receive a certificate. The key never leaves this machine; the token is not needed again.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cryptography import x509

from ravnest.core.config import config
from ravnest.core.ids import check_id
from ravnest.errors import IdentityError, RequestRejected
from ravnest.node.client import Client, pinned_context, unverified_context
from ravnest.transport.address import Address, show
from ravnest.transport.identity import Identity, fingerprint, make_key, make_request, save_identity
from ravnest.transport.ticket import Ticket

__all__ = ["EnrollmentRequest", "UntrustedCoordinator", "enrol", "fetch_authority", "known_identity"]


class UntrustedCoordinator(IdentityError):
    """The server at the ticket's address is not its coordinator; the token was not sent."""


@config
class EnrollmentRequest:
    """Name and ticket of a new member, and the directory for its identity."""

    ticket: Ticket
    name: str
    release: str
    directory: Path

    def __post_init__(self) -> None:
        check_id(self.name)


class _Response(msgspec.Struct):
    name: str
    certificate: str
    authority: str


def known_identity(ticket: Ticket, directory: Path, *, now: datetime | None = None) -> Identity | None:
    """Load an identity that is of the ticket's authority and still valid; None without one."""
    with contextlib.suppress(IdentityError, OSError, ValueError):
        identity = Identity.load(directory)
        certificate = x509.load_pem_x509_certificate(identity.certificate_path.read_bytes())
        is_valid = certificate.not_valid_after_utc > (now or datetime.now(UTC))
        if is_valid and fingerprint(identity.authority_path.read_bytes()) == ticket.fingerprint:
            return identity
    return None


async def enrol(request: EnrollmentRequest, address: Address) -> Identity:
    """Get a new identity from the coordinator at `address`."""
    authority = await fetch_authority(request.ticket, address)
    key = make_key()
    body = {
        "token": request.ticket.token,
        "name": request.name,
        "request": make_request(key, request.name).decode(),
        "release": request.release,
    }
    async with Client(address, pinned_context(authority)) as client:
        response = await client.ask("POST", "/v1/enrol", json=body)
    try:
        granted = msgspec.json.decode(response, type=_Response)
        return save_identity(request.directory, key, granted.certificate.encode(), authority)
    except ValueError as error:
        raise IdentityError(f"could not decode the coordinator's response to the ticket: {error}") from error


async def fetch_authority(ticket: Ticket, address: Address) -> bytes:
    """Return the authority's certificate; raises `UntrustedCoordinator` unless it has the ticket's fingerprint."""
    certificate, actual = b"", "none"
    async with Client(address, unverified_context()) as client:
        with contextlib.suppress(RequestRejected, IdentityError):  # another server, with another page or none
            certificate = await client.ask("GET", "/v1/authority")
            actual = fingerprint(certificate)
    if actual != ticket.fingerprint:
        raise UntrustedCoordinator(
            f"the server at {show(address)} is not the coordinator of this ticket (fingerprint {actual[:16]}, expected "
            f"{ticket.fingerprint[:16]}); the token was not sent. Ask for a new ticket"
        )
    return certificate
