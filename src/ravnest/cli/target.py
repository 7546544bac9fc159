"""Connects commands to a coordinator: by a ticket, which may read the status, or by its directory.

A ticket has the fingerprint of the coordinator's authority and a token. The coordinator's directory has the
requester's certificate, which only this user can read, and the address that the coordinator listens at.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ravnest.coordinator.certificates import REQUESTER, requester_identity
from ravnest.coordinator.status import RunStatus
from ravnest.errors import LinkError, RavnestError
from ravnest.node.client import Client, LocalClient, member_context, pinned_context
from ravnest.node.membership import fetch_authority
from ravnest.run.coordinator_thread import coordinators_directory
from ravnest.transport.address import Address, parse_address
from ravnest.transport.ticket import Ticket

__all__ = ["CoordinatorTarget", "find_target", "get_status", "post_as_requester"]

_MAX_STATUS_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class CoordinatorTarget:
    """A coordinator's addresses, and the credentials for it: a ticket, or its directory."""

    addresses: tuple[Address, ...]
    ticket: Ticket | None = None
    folder: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    socket: Path | None = None  # of a local run

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        """Yield a client of the first address that answers."""
        if self.socket is not None:
            async with LocalClient(self.socket, REQUESTER) as client:
                yield client
            return
        failure: RavnestError = LinkError("the ticket has no address")
        for address in self.addresses:
            try:
                context = await self.context(address)
            except LinkError as error:
                failure = error
                continue
            async with Client(address, context) as client:
                yield client
                return
        raise failure

    async def context(self, address: Address) -> ssl.SSLContext:
        """Return the context of connections to one of its addresses."""
        if self.ticket is not None:
            return pinned_context(await fetch_authority(self.ticket, address))
        assert self.folder is not None
        return member_context(requester_identity(self.folder))


def find_target(text: str | None) -> CoordinatorTarget:
    """Return the coordinator of a ticket, of a run's directory or of its own; for None, the only one of this user."""
    if text is not None and text.strip().lower().startswith("rav"):
        ticket = Ticket.parse(text)
        return CoordinatorTarget(ticket.addresses, ticket, headers={"Authorization": f"Bearer {ticket.token}"})
    return _in_directory(_coordinator_directory(Path(text)) if text is not None else _only_running())


def _coordinator_directory(path: Path) -> Path:
    """Return `path` itself, or the directory in the `coordinator.txt` of a run."""
    pointer = path / "coordinator.txt"
    if pointer.is_file():
        return Path(pointer.read_text().strip())
    if not path.is_dir():
        raise ValueError(f"{str(path)!r} is neither a ticket nor the directory of a run or coordinator")
    return path


def _only_running() -> Path:
    running = sorted(path.parent for path in coordinators_directory().glob("*/address"))
    if len(running) == 1:
        return running[0]
    if not running:
        raise ValueError("no coordinator of this user is running here: give a ticket, or the directory of a run")
    raise ValueError(f"several coordinators are running here: give one of {', '.join(map(str, running))}")


def _in_directory(directory: Path) -> CoordinatorTarget:
    with contextlib.suppress(OSError):
        return CoordinatorTarget((), folder=directory, socket=Path((directory / "socket").read_text().strip()))
    try:
        address = parse_address((directory / "address").read_text())
    except OSError:
        raise ValueError(f"the coordinator of {directory} is not running") from None
    return CoordinatorTarget((address,), folder=directory)


async def get_status(target: CoordinatorTarget) -> RunStatus:
    async with target.connect() as client:
        answer = bytearray()
        async with client.request("GET", "/v1/status", headers=dict(target.headers)) as response:
            async for chunk in response.content.iter_any():
                answer += chunk
                if len(answer) > _MAX_STATUS_BYTES:
                    raise LinkError(f"the coordinator's status is longer than {_MAX_STATUS_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(answer), type=RunStatus)
    except ValueError as error:
        raise LinkError(f"could not decode the coordinator's status: {error}") from error


def post_as_requester(run: Path | None, path: str, body: dict[str, object]) -> bytes:
    """Send a request that needs the requester's certificate, which is in the coordinator's directory."""
    target = find_target(None if run is None else str(run))
    if target.folder is None:
        raise ValueError("a ticket is not enough: give the directory of the run, on the machine where it runs")

    async def post() -> bytes:
        async with target.connect() as client:
            return await client.ask("POST", path, json=body)

    return asyncio.run(post())
