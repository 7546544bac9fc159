"""A coordinator from the outside: by a ticket, as one who may look, or by its folder, as its requester.

A ticket shows whom to trust, and its token says that one was invited. The folder of a coordinator has the requester's
own certificate, so only this user has it; it also says where the coordinator listens.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .coordinator.people import requester_identity
from .coordinator.status import Status
from .core.errors import LinkError, RavnestError
from .core.here import data_directory
from .net.addresses import Address
from .net.ticket import Ticket
from .node.client import Client, member_context, pinned_context
from .node.enrol import look_at_authority
from .profile.line import parse_address

__all__ = ["Target", "coordinators_directory", "find_target", "get_status"]

_MAX_STATUS_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Target:
    """A coordinator, and how to show it who asks."""

    addresses: tuple[Address, ...]
    ticket: Ticket | None = None
    folder: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """A connection to whichever of the addresses answers."""
        wrong: RavnestError = LinkError("the ticket has no address")
        for address in self.addresses:
            try:
                context = await self._context(address)
            except LinkError as error:
                wrong = error
                continue
            async with Client(address, context) as client:
                yield client
                return
        raise wrong

    async def _context(self, address: Address) -> ssl.SSLContext:
        if self.ticket is not None:
            return pinned_context(await look_at_authority(self.ticket, address))
        assert self.folder is not None
        return member_context(requester_identity(self.folder))


def coordinators_directory() -> Path:
    """Where coordinators of this user keep their files, unless told otherwise: a folder for each port."""
    return data_directory() / "coordinators"


def find_target(text: str | None) -> Target:
    """From a ticket, a coordinator's folder, or the folder of a run; without any, the one that runs here."""
    if text is not None and text.strip().lower().startswith("rav"):
        ticket = Ticket.parse(text)
        return Target(ticket.addresses, ticket, headers={"Authorization": f"Bearer {ticket.token}"})
    return _in_folder(_named(Path(text)) if text is not None else _the_only())


def _named(path: Path) -> Path:
    """A coordinator's own folder, or a run's, which says where it is."""
    pointer = path / "coordinator.txt"
    if pointer.is_file():
        return Path(pointer.read_text().strip())
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is neither a ticket nor the folder of a run or coordinator")
    return path


def _the_only() -> Path:
    listening = sorted(path.parent for path in coordinators_directory().glob("*/address"))
    if len(listening) == 1:
        return listening[0]
    if not listening:
        raise ValueError("no coordinator of this user runs here: give a ticket, or the folder of a run")
    raise ValueError(f"several coordinators run here: give one of {', '.join(map(str, listening))}")


def _in_folder(folder: Path) -> Target:
    try:
        address = parse_address((folder / "address").read_text())
    except OSError:
        raise ValueError(f"the coordinator of {folder} does not run now") from None
    return Target((address,), folder=folder)


async def get_status(target: Target) -> Status:
    """Where the run stands."""
    async with target.connect() as client:
        answer = bytearray()
        async with client.request("GET", "/v1/status", headers=dict(target.headers)) as response:
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > _MAX_STATUS_BYTES:
                    raise LinkError("the coordinator's status is too long to be one")
    try:
        return msgspec.json.decode(bytes(answer), type=Status)
    except ValueError as error:
        raise LinkError(f"the coordinator's status cannot be read: {error}") from error
