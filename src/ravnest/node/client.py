"""HTTPS client of the coordinator, which must authenticate with a certificate of the ticket's authority.

Failures of the connection raise `LinkError`; requests that the coordinator rejects raise `RequestRejected`.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from ravnest.core.ids import COORDINATOR
from ravnest.errors import IdentityError, LinkClosed, LinkError, LinkTimeout, RequestRejected
from ravnest.protocol.control import NODE_HEADER
from ravnest.transport.address import Address, show
from ravnest.transport.identity import Identity

__all__ = ["COORDINATOR", "Client", "LocalClient", "member_context", "pinned_context", "unverified_context"]

_CONNECT_S = 10.0
_READ_S = 30.0
_MAX_BODY_BYTES = 64 * 1024


def unverified_context() -> ssl.SSLContext:
    """Return a context that accepts any server; only for reading public data, never for secrets."""
    context = _context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def pinned_context(authority_pem: bytes) -> ssl.SSLContext:
    """Return a context that accepts only the coordinator of this authority."""
    context = _context()
    context.load_verify_locations(cadata=authority_pem.decode())
    return context


def member_context(identity: Identity) -> ssl.SSLContext:
    """Return a pinned context that also presents the certificate of this node."""
    try:
        context = pinned_context(identity.authority_path.read_bytes())
        context.load_cert_chain(identity.certificate_path, identity.key_path)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"cannot use the identity in {identity.directory}: {error}") from error
    return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    return context


class Client:
    """Requests to the coordinator at one address; as a context manager it closes its connections."""

    def __init__(self, address: Address, context: ssl.SSLContext) -> None:
        self.address = address
        self._context = context

    async def __aenter__(self) -> Client:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
        connector = aiohttp.TCPConnector(ssl=self._context)
        self._session = aiohttp.ClientSession(f"https://{show(self.address)}", connector=connector, timeout=limits)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the successful response."""
        with self._translated_errors():
            async with self._session.request(
                method, path, server_hostname=COORDINATOR, allow_redirects=False, **options
            ) as response:
                if response.status != 200:
                    raise RequestRejected(await _reason(response), response.status)
                yield response

    async def ask(self, method: str, path: str, **options: Any) -> bytes:
        """Send a request and return the whole, short body of the response."""
        async with self.request(method, path, **options) as response:
            return await _read_body(response)

    async def connect(self, path: str, *, max_message_bytes: int) -> aiohttp.ClientWebSocketResponse[bool]:
        """Open a WebSocket, which the caller must close."""
        with self._translated_errors():
            try:
                return await self._session.ws_connect(
                    path,
                    server_hostname=COORDINATOR,
                    max_msg_size=max_message_bytes,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                    heartbeat=_READ_S,
                )
            except aiohttp.WSServerHandshakeError as error:
                await self.ask("GET", path)  # rejected too, with a reason
                raise RequestRejected(f"the coordinator rejected the session: {error.message}", error.status) from error

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Translate exceptions of aiohttp."""
        address = show(self.address)
        try:
            yield
        except TimeoutError as error:
            raise LinkTimeout(f"the coordinator at {address} does not answer: timed out") from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise LinkError(f"the server at {address} is not the coordinator of this ticket") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LinkClosed(f"the coordinator at {address} does not answer: {_describe(error)}") from error


class LocalClient(Client):
    """Requests to the coordinator of a local run over its unix socket, in the name of a node or the requester."""

    def __init__(self, path: Path, name: str) -> None:
        self.address = (str(path), 0)
        self._path, self._name = path, name

    async def __aenter__(self) -> LocalClient:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
        self._session = aiohttp.ClientSession(
            f"http://{COORDINATOR}",
            connector=aiohttp.UnixConnector(str(self._path)),
            timeout=limits,
            headers={NODE_HEADER: self._name},
        )
        return self


def _describe(error: Exception) -> str:
    """Return the system's message, without what aiohttp adds to it."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else str(error) or type(error).__name__


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise LinkError(f"the coordinator's response is longer than {_MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _reason(response: aiohttp.ClientResponse) -> str:
    """Return the reason in a rejecting response."""
    with contextlib.suppress(ValueError, LinkError):
        body = msgspec.json.decode(await _read_body(response), type=dict[str, Any])
        if "error" in body:
            return str(body["error"])[:1000]
    return f"the coordinator answered with status {response.status}"
