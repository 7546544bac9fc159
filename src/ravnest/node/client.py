"""HTTPS to the coordinator: whoever answers must prove to be it, with a certificate of the ticket's authority.

What goes wrong on the way is a `LinkError`; what the coordinator itself refuses is a `Refused`, with its sentence.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec

from ..core.errors import IdentityError, LinkClosed, LinkError, LinkTimeout, RavnestError
from ..net.addresses import Address, show
from ..net.identity import Identity

__all__ = ["COORDINATOR", "Client", "Refused", "blind_context", "member_context", "pinned_context"]

COORDINATOR = "coordinator"
_CONNECT_S = 10.0
_READ_S = 30.0
_MAX_ANSWER_BYTES = 64 * 1024


class Refused(RavnestError):
    """The coordinator said no; `status` is HTTP's."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


def blind_context() -> ssl.SSLContext:
    """Trusts whoever answers; only to look at what it shows, never to tell it anything."""
    context = _context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def pinned_context(authority_pem: bytes) -> ssl.SSLContext:
    """Trusts the coordinator of this authority and nobody else."""
    context = _context()
    context.load_verify_locations(cadata=authority_pem.decode())
    return context


def member_context(identity: Identity) -> ssl.SSLContext:
    """The same, and shows who we are."""
    try:
        context = pinned_context(identity.authority_path.read_bytes())
        context.load_cert_chain(identity.certificate_path, identity.key_path)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"the identity in {identity.directory} cannot be used: {error}") from error
    return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    return context


class Client:
    """Requests to the coordinator at one address; a context that ends its connections."""

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
    async def request(self, method: str, path: str, **given: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that says yes."""
        with self._told():
            async with self._session.request(
                method, path, server_hostname=COORDINATOR, allow_redirects=False, **given
            ) as response:
                if response.status != 200:
                    raise Refused(await _reason(response), response.status)
                yield response

    async def ask(self, method: str, path: str, **given: Any) -> bytes:
        """A short answer, whole."""
        async with self.request(method, path, **given) as response:
            return await _short(response)

    async def connect(self, path: str, *, max_message_bytes: int) -> aiohttp.ClientWebSocketResponse[bool]:
        """A WebSocket, which is the caller's to close."""
        with self._told():
            try:
                return await self._session.ws_connect(
                    path,
                    server_hostname=COORDINATOR,
                    max_msg_size=max_message_bytes,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                    heartbeat=_READ_S,
                )
            except aiohttp.WSServerHandshakeError as error:
                await self.ask("GET", path)  # which is refused too, and in words
                raise Refused(f"the coordinator does not talk to this node: {error.message}", error.status) from error

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What aiohttp raises, in our words."""
        where = show(self.address)
        try:
            yield
        except TimeoutError as error:
            raise LinkTimeout(f"the coordinator at {where} does not answer: no word in time") from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise LinkError(f"at {where} is somebody else than the coordinator of this ticket") from error
        except (aiohttp.ClientError, OSError) as error:
            raise LinkClosed(f"the coordinator at {where} does not answer: {_words(error)}") from error


def _words(error: Exception) -> str:
    """What went wrong, without aiohttp's own words over it."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if isinstance(number, int) and number > 0 else str(error) or type(error).__name__


async def _short(response: aiohttp.ClientResponse) -> bytes:
    answer = bytearray()
    async for chunk in response.content.iter_any():
        answer += chunk
        if len(answer) > _MAX_ANSWER_BYTES:
            raise LinkError(f"the coordinator's answer is over {_MAX_ANSWER_BYTES} bytes")
    return bytes(answer)


async def _reason(response: aiohttp.ClientResponse) -> str:
    """The sentence in an answer that says no."""
    with contextlib.suppress(ValueError, LinkError):
        said = msgspec.json.decode(await _short(response), type=dict[str, Any])
        return str(said["error"])[:1000] if "error" in said else f"the coordinator answered {response.status}"
    return f"the coordinator answered {response.status}"
