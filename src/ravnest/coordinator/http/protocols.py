"""Protocols behind the TLS server: HTTP with a timeout for the first request, and a check for members.

Malformed requests that aiohttp would log are recorded as rejections, and internal errors as notes, so that neither is
written to the requester's terminal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ravnest.coordinator.certificates import address_of, name_of
from ravnest.coordinator.http.alpn_server import ProtocolFactory

__all__ = ["ForwardingProtocol", "HttpProtocol", "RejectionReason", "members_only"]

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
"""Why a node with a certificate of this name is rejected; None if it is a member."""


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
        assert self._runner.server is not None, "it is open"
        connection = _HttpConnection(self, self._runner.server())
        self._pending[connection.inner] = connection
        return connection

    @property
    def request_s(self) -> float:
        return self._request_s

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
    logger = logging.Logger("ravnest.coordinator.http.protocols")  # not registered: no other logger is affected
    logger.addHandler(_AiohttpLogHandler(on_rejected, on_error))
    return logger
