"""One TLS port for everything that a coordinator serves: ALPN selects the protocol.

A connection counts from its first moment, before TLS, so that connections that never finish the handshake are bounded:
in total, per network address, and during the handshake, where the oldest one is rejected for a new one. Addresses of
one IPv6 /64 count as one, since a network has 2**64 of them.

Behind TLS, `members_only` rejects clients without a certificate of a member, and `HttpProtocol` serves HTTP with a
timeout for the first request. Malformed requests that aiohttp would log are recorded as rejections, and internal errors
as notes, so that neither is written to the requester's terminal.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ravnest.coordinator.certificates import address_of, name_of
from ravnest.core.config import config, require
from ravnest.protocol.relay import FEED_PROTOCOL, RELAY_PROTOCOL
from ravnest.transport.address import home_of, plain_host, show
from ravnest.transport.identity import Identity
from ravnest.transport.tls import tls_context, tune

__all__ = ["AlpnServer", "AlpnServerConfig", "server_context", "HttpProtocol", "members_only"]

ProtocolFactory: TypeAlias = Callable[[], asyncio.Protocol]

# asyncio allocates and zeroes a buffer for every TLS connection, by default 256 KiB. 32 KiB take less memory, and half
# the CPU per byte.
_BUFFER_BYTES = 32 * 1024


def _ignore(address: str, reason: str) -> None:
    """The default of `on_rejected`."""


@config
class AlpnServerConfig:
    """Limits and timeouts; `on_rejected(address, reason)` is called for rejected connections."""

    max_connections: int = 4096
    max_per_address: int = 512
    max_handshakes: int = 128
    handshake_s: float = 10.0
    first_byte_s: float = 10.0
    shutdown_s: float = 10.0
    on_rejected: Callable[[str, str], None] = _ignore

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_per_address", "max_handshakes"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")
        for name in ("handshake_s", "first_byte_s", "shutdown_s"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")


def server_context(identity: Identity) -> ssl.SSLContext:
    """TLS 1.3 with the coordinator's certificate; client certificates are optional."""
    context = tls_context(identity, server_side=True)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.set_alpn_protocols([RELAY_PROTOCOL, FEED_PROTOCOL, "http/1.1"])
    return context


class AlpnServer:
    """A protocol factory for `loop.create_server` (without ssl: it starts TLS itself).

    `by_protocol` are the factories by ALPN protocol; `default` is for all other connections.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        by_protocol: Mapping[str, ProtocolFactory],
        default: ProtocolFactory,
        config: AlpnServerConfig | None = None,
    ) -> None:
        self.context, self.config = context, config or AlpnServerConfig()
        self._by_protocol, self._default = dict(by_protocol), default
        asyncio.sslproto.SSLProtocol.max_size = _BUFFER_BYTES  # asyncio has no setting per connection
        self._connections: set[_Connection] = set()
        self._handshakes: dict[_Connection, None] = {}  # the oldest first
        self._per_address: Counter[str] = Counter()

    def __call__(self) -> asyncio.Protocol:
        return _Connection(self)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_handshakes(self) -> int:
        return len(self._handshakes)

    def close(self) -> None:
        """Abort all connections; the caller closes the listening server."""
        for connection in list(self._connections):
            connection.abort()
            self.remove(connection)

    def admit(self, connection: _Connection) -> bool:
        """Count a connection, or reject it."""
        limits = self.config
        if len(self._connections) >= limits.max_connections:
            self.reject(connection, f"the limit of {limits.max_connections} connections is reached")
            return False
        if self._per_address[connection.network] >= limits.max_per_address:
            self.reject(connection, f"the limit of {limits.max_per_address} connections from its network is reached")
            return False
        if len(self._handshakes) >= limits.max_handshakes:
            oldest = next(iter(self._handshakes))
            self.reject(oldest, f"its handshake was the oldest of more than {limits.max_handshakes}")
        self._connections.add(connection)
        self._handshakes[connection] = None
        self._per_address[connection.network] += 1
        return True

    def handshake_done(self, connection: _Connection) -> None:
        self._handshakes.pop(connection, None)

    def remove(self, connection: _Connection) -> None:
        self._handshakes.pop(connection, None)
        if connection in self._connections:
            self._connections.discard(connection)
            self._per_address[connection.network] -= 1
            if not self._per_address[connection.network]:
                del self._per_address[connection.network]

    def reject(self, connection: _Connection, reason: str) -> None:
        connection.abort()
        self.remove(connection)
        self.config.on_rejected(connection.address, reason)

    def protocol_for(self, transport: asyncio.Transport) -> asyncio.Protocol:
        selected = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        return self._by_protocol.get(selected, self._default)()


class _Connection(asyncio.Protocol):
    """A connection before and after TLS; `_protocol` handles it once ALPN has selected one."""

    def __init__(self, server: AlpnServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._handshake_task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._buffered = bytearray()
        self._protocol: asyncio.Protocol | None = None
        self.address = self.network = "unknown address"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if name := transport.get_extra_info("peername"):
            host = plain_host(name[0])
            self.address, self.network = show((host, name[1])), home_of(host)
        if self._server.admit(self):
            self._transport.pause_reading()
            tune(transport.get_extra_info("socket"))
            self._handshake_task = asyncio.get_running_loop().create_task(self._handshake())

    def data_received(self, data: bytes) -> None:
        if self._protocol is None:
            self._buffered += data  # arrived with the end of the handshake, before `start_tls` returned
        else:
            self._stop_timer()
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received() if self._protocol is not None else None

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        self._server.remove(self)
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def abort(self) -> None:
        # A handshake that starts on a lost connection would never end. The reference to the task is dropped: the frames
        # of its error refer to this connection, and would keep its buffers until a garbage collection.
        task, self._handshake_task = self._handshake_task, None
        if task is not None:
            task.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _handshake(self) -> None:
        limits = self._server.config
        assert self._transport is not None
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                self._server.context,
                server_side=True,
                ssl_handshake_timeout=limits.handshake_s,
                ssl_shutdown_timeout=limits.shutdown_s,
            )
        except OSError as error:  # TLS errors and the timeout are OSErrors too
            self._server.reject(self, f"the handshake failed: {error}")
            return
        self._server.handshake_done(self)
        if transport is None or transport.is_closing():  # it was rejected meanwhile
            self._server.remove(self)
            return
        self._connect_protocol(transport)

    def _connect_protocol(self, transport: asyncio.Transport) -> None:
        wait_s = self._server.config.first_byte_s
        self._timer = asyncio.get_running_loop().call_later(
            wait_s, lambda: self._server.reject(self, f"no data within {wait_s:g} s")
        )
        self._protocol = self._server.protocol_for(transport)
        self._protocol.connection_made(transport)
        if self._buffered:
            buffered, self._buffered = bytes(self._buffered), bytearray()
            self.data_received(buffered)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Protocols behind TLS.

_KEEPALIVE_S = 30.0
_CLOSE_S = 2.0  # for responses in progress


class ForwardingProtocol(asyncio.Protocol):
    """Forwards everything to `inner`, which a subclass sets."""

    inner: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self.inner is not None:
            self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.inner is not None:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received() if self.inner is not None else None

    def pause_writing(self) -> None:
        if self.inner is not None:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self.inner is not None:
            self.inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self.inner is not None:
            self.inner.connection_lost(error)


RejectionReason: TypeAlias = Callable[[str], str | None]
"""Maps the name in a certificate to the reason why the node is rejected; None if it is a member."""


def members_only(
    factory: ProtocolFactory, rejection_reason: RejectionReason, on_rejected: Callable[[str, str], None]
) -> ProtocolFactory:
    """A factory that connects members to `factory`, and rejects others before reading a byte."""
    return lambda: _MembersOnlyProtocol(factory, rejection_reason, on_rejected)


class _MembersOnlyProtocol(ForwardingProtocol):
    def __init__(
        self, factory: ProtocolFactory, rejection_reason: RejectionReason, on_rejected: Callable[[str, str], None]
    ) -> None:
        self._factory, self._rejection_reason, self._on_rejected = factory, rejection_reason, on_rejected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        name = name_of(transport)
        reason = "members only: join with a ticket" if name is None else self._rejection_reason(name)
        if reason is None:
            self.inner = self._factory()
            super().connection_made(transport)
        else:
            self._on_rejected(address_of(transport), reason)
            cast("asyncio.Transport", transport).abort()


class HttpProtocol:
    """Serves an app. Pass it to an `AlpnServer` as the protocol factory, between `open` and `close`."""

    def __init__(
        self,
        app: web.Application,
        *,
        request_s: float,
        on_rejected: Callable[[str, str], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._request_s, self._on_rejected = request_s, on_rejected
        self._pending: dict[Any, _HttpConnection] = {}  # connections without a complete request
        app.middlewares.append(self._first_request_middleware())
        self._runner = web.AppRunner(
            app, access_log=None, logger=_aiohttp_logger(on_rejected, on_error), keepalive_timeout=_KEEPALIVE_S,
            lingering_time=request_s, shutdown_timeout=_CLOSE_S, handle_signals=False,
            auto_decompress=False,  # a decompression bomb
        )  # fmt: skip

    async def open(self) -> None:
        await self._runner.setup()

    async def close(self) -> None:
        await self._runner.cleanup()

    def __call__(self) -> asyncio.Protocol:
        assert self._runner.server is not None, "called between open and close"
        connection = _HttpConnection(self, self._runner.server())
        self._pending[connection.inner] = connection
        return connection

    @property
    def request_s(self) -> float:
        return self._request_s

    @property
    def num_connections(self) -> int:
        return 0 if self._runner.server is None else len(self._runner.server.connections)

    def discard(self, connection: _HttpConnection) -> None:
        self._pending.pop(connection.inner, None)

    def reject(self, address: str) -> None:
        self._on_rejected(address, f"no complete request within {self._request_s:g} s")

    def _first_request_middleware(self) -> Any:
        @web.middleware
        async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
            connection = self._pending.pop(request.protocol, None)
            if connection is not None:
                connection.stop_timer()
            response: web.StreamResponse = await handler(request)
            return response

        return middleware


class _HttpConnection(ForwardingProtocol):
    """A connection with a timeout until its first request is complete."""

    def __init__(self, server: HttpProtocol, inner: asyncio.Protocol) -> None:
        self._server, self.inner = server, inner
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(self._server.request_s, self._time_out)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.stop_timer()
        self._server.discard(self)
        super().connection_lost(error)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._server.reject(address_of(self._transport))
        self._transport.abort()


class _AiohttpLogHandler(logging.Handler):
    """Turns log records of aiohttp into rejections and notes."""

    def __init__(self, on_rejected: Callable[[str, str], None], on_error: Callable[[str], None]) -> None:
        super().__init__()
        self._on_rejected, self._on_error = on_rejected, on_error

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            address = record.args[0] if isinstance(record.args, tuple) and record.args else None
            self._on_rejected(f"{address or 'unknown address'}", "malformed HTTP request")
        elif record.levelno >= logging.ERROR and not isinstance(error, ConnectionError):
            self._on_error(f"internal error in a request: {error!r}")


def _aiohttp_logger(on_rejected: Callable[[str, str], None], on_error: Callable[[str], None]) -> logging.Logger:
    logger = logging.Logger("ravnest.coordinator.http.alpn_server")  # not registered: no other logger is affected
    logger.addHandler(_AiohttpLogHandler(on_rejected, on_error))
    return logger
