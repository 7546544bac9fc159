"""How an agent belongs to a run: by a ticket, as a member of a fleet, or as a node of a local run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ravnest.core.backoff import Backoff
from ravnest.errors import LinkError, RavnestError
from ravnest.node.client import Client, LocalClient, member_context
from ravnest.node.enrollment import EnrollmentRequest, UntrustedCoordinator, enrol, known_identity
from ravnest.node.storage import host_sockets
from ravnest.transport.address import Address, show
from ravnest.transport.local import control_socket
from ravnest.transport.ticket import Ticket

__all__ = ["LocalMembership", "Membership", "TicketMembership"]


class Membership(Protocol):
    """The coordinator of a run, as one of its nodes knows it."""

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
        """Nothing to do."""

    def connect(self) -> Client:
        return LocalClient(control_socket(self._directory), self.name)

    def try_next_address(self) -> None:
        """There is one."""


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
