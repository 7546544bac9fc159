"""From a ticket to an identity: trust the coordinator first, then be trusted by it.

1. Whoever answers shows its authority's certificate. If that has not the ticket's fingerprint, it hears nothing more.
2. Over a connection that only a coordinator of that authority can answer, the token and a signing request go out, and
   a certificate comes back. The key never leaves this machine; the token is not needed again.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cryptography import x509

from ..core.config import config
from ..core.errors import IdentityError
from ..core.ids import check_id
from ..net.addresses import Address, show
from ..net.identity import Identity, fingerprint, make_key, make_request, save_identity
from ..net.ticket import Ticket
from .client import Client, Refused, blind_context, pinned_context

__all__ = ["Applicant", "NotTheCoordinator", "enrol", "known_identity", "look_at_authority"]


class NotTheCoordinator(IdentityError):
    """Somebody else answers at the ticket's address; the token was not sent."""


@config
class Applicant:
    """Who asks to join, with what ticket, and where its identity is kept."""

    ticket: Ticket
    name: str
    release: str
    directory: Path

    def __post_init__(self) -> None:
        check_id(self.name)


class _Answer(msgspec.Struct):
    name: str
    certificate: str
    authority: str


def known_identity(ticket: Ticket, directory: Path, *, now: datetime | None = None) -> Identity | None:
    """The identity of an earlier time, if it is of the ticket's authority and still valid."""
    with contextlib.suppress(IdentityError, OSError, ValueError):
        identity = Identity.load(directory)
        certificate = x509.load_pem_x509_certificate(identity.certificate_path.read_bytes())
        is_valid = certificate.not_valid_after_utc > (now or datetime.now(UTC))
        if is_valid and fingerprint(identity.authority_path.read_bytes()) == ticket.fingerprint:
            return identity
    return None


async def enrol(applicant: Applicant, address: Address) -> Identity:
    """A new identity from the coordinator at `address`."""
    authority = await look_at_authority(applicant.ticket, address)
    key = make_key()
    asked = {
        "token": applicant.ticket.token,
        "name": applicant.name,
        "request": make_request(key, applicant.name).decode(),
        "release": applicant.release,
    }
    async with Client(address, pinned_context(authority)) as client:
        answer = await client.ask("POST", "/v1/enrol", json=asked)
    try:
        given = msgspec.json.decode(answer, type=_Answer)
        return save_identity(applicant.directory, key, given.certificate.encode(), authority)
    except ValueError as error:
        raise IdentityError(f"the coordinator's answer to the ticket cannot be read: {error}") from error


async def look_at_authority(ticket: Ticket, address: Address) -> bytes:
    shown, found = b"", "none"
    async with Client(address, blind_context()) as client:
        with contextlib.suppress(Refused, IdentityError):  # some other server, with some other page or none
            shown = await client.ask("GET", "/v1/authority")
            found = fingerprint(shown)
    if found != ticket.fingerprint:
        raise NotTheCoordinator(
            f"at {show(address)} is not the coordinator of this ticket (fingerprint {found[:16]}, not "
            f"{ticket.fingerprint[:16]}): the ticket was not shown to it. Ask for a new ticket"
        )
    return shown
