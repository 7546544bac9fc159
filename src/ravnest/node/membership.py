"""Membership of an agent in a run: as a member of a fleet, by a ticket, or as a node of a local run.

Enrollment with a ticket authenticates the coordinator first, then gets a certificate from it:

1. Fetch the authority's certificate from the server. Without the ticket's fingerprint, nothing more is sent to it.
2. Over a connection that only a coordinator of that authority can accept, send the token and a signing request, and
   receive a certificate. The key never leaves this machine; the token is not needed again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec
from cryptography import x509

from ravnest.core.clock import Backoff
from ravnest.core.config import config
from ravnest.core.ids import check_id
from ravnest.errors import IdentityError, LinkError, RavnestError, RequestRejected
from ravnest.node.client import Client, LocalClient, member_context, pinned_context, unverified_context
from ravnest.node.storage import host_sockets
from ravnest.transport.address import Address, show
from ravnest.transport.identity import Identity, fingerprint, make_key, make_request, save_identity
from ravnest.transport.local import control_socket
from ravnest.transport.ticket import Ticket

__all__ = [
    "LocalMembership",
    "Membership",
    "TicketMembership",
    "EnrollmentRequest",
    "UntrustedCoordinator",
    "enrol",
    "fetch_authority",
    "known_identity",
]


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


# memberships


class Membership(Protocol):
    """Connects an agent to the coordinator of its run."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str:
        """The directory of the node's certificate; empty in a local run."""

    @property
    def coordinator(self) -> Address: ...

    @property
    def sockets(self) -> tuple[Path | None, str]:
        """The directory of this host's sockets, and the name of the host in the run; None: no unix sockets here."""

    @property
    def num_addresses(self) -> int: ...

    async def join(self, log: Callable[[str], None]) -> None:
        """Become a member; retries until it succeeds."""

    def connect(self) -> Client:
        """Return a client of the coordinator."""

    def try_next_address(self) -> None: ...


class LocalMembership:
    """A node of a local run: no enrollment, the coordinator listens in `sockets`."""

    identity = ""
    coordinator: Address = ("", 0)
    num_addresses = 1

    def __init__(self, name: str, sockets: Path) -> None:
        self.name, self._directory = name, sockets

    @property
    def sockets(self) -> tuple[Path | None, str]:
        return self._directory, "local"

    async def join(self, log: Callable[[str], None]) -> None:
        """Do nothing: local nodes are members from the start."""

    def connect(self) -> Client:
        return LocalClient(control_socket(self._directory), self.name)

    def try_next_address(self) -> None:
        """Do nothing: there is only one address."""


class TicketMembership:
    """A member of a fleet: enrolls once with the ticket, then shows its certificate."""

    def __init__(self, ticket: Ticket, name: str, release: str, directory: Path) -> None:
        self.name = name
        self.identity = str(directory)
        self._ticket, self._release, self._directory = ticket, release, directory
        self._addresses: deque[Address] = deque(ticket.addresses)  # the one that answered last is first

    @property
    def coordinator(self) -> Address:
        return self._addresses[0]

    @property
    def sockets(self) -> tuple[Path | None, str]:
        return host_sockets(self._ticket.fingerprint)

    @property
    def num_addresses(self) -> int:
        return len(self._addresses)

    async def join(self, log: Callable[[str], None]) -> None:
        identity = known_identity(self._ticket, self._directory)
        backoff = Backoff()
        request = EnrollmentRequest(
            ticket=self._ticket, name=self.name, release=self._release, directory=self._directory
        )
        while identity is None:
            errors: list[RavnestError] = []
            for _ in range(len(self._addresses)):
                log(f"joining {show(self.coordinator)}")
                try:
                    identity = await enrol(request, self.coordinator)
                    break
                except (LinkError, UntrustedCoordinator) as error:
                    errors.append(error)
                self.try_next_address()
            else:
                if all(isinstance(error, UntrustedCoordinator) for error in errors):
                    raise errors[0]
                log(f"{errors[0]}; retrying with backoff")
                await asyncio.sleep(backoff.next_s())
        self.name, self._context = identity.name, member_context(identity)

    def connect(self) -> Client:
        return Client(self.coordinator, self._context)

    def try_next_address(self) -> None:
        self._addresses.rotate(-1)
