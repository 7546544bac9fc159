"""HTTP on the coordinator's port: who never finishes a first request is sent away, and nothing goes to the terminal.

What aiohttp would print about strangers who do not speak HTTP is told as a refusal instead, and an error of our own as
a note: the requester's terminal is no place for either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from .people import address_of
from .through import Through

__all__ = ["WebPort"]

_KEEPALIVE_S = 30.0
_CLOSE_S = 2.0  # for answers that are under way when it closes


class WebPort:
    """Serves an app. It is the factory of protocols: give it to a `Front`, between `open` and `close`."""

    def __init__(
        self,
        app: web.Application,
        *,
        request_s: float,
        on_refused: Callable[[str, str], None],
        on_error: Callable[[str], None],
    ) -> None:
        self._request_s, self._on_refused = request_s, on_refused
        self._silent: dict[Any, _Caller] = {}  # those without a whole request so far
        app.middlewares.append(self._heed())
        self._runner = web.AppRunner(
            app, access_log=None, logger=_told(on_refused, on_error), keepalive_timeout=_KEEPALIVE_S,
            lingering_time=request_s, shutdown_timeout=_CLOSE_S, handle_signals=False,
            auto_decompress=False,  # a few bytes could become gigabytes
        )  # fmt: skip

    async def open(self) -> None:
        await self._runner.setup()

    async def close(self) -> None:
        await self._runner.cleanup()

    def __call__(self) -> asyncio.Protocol:
        assert self._runner.server is not None, "it is open"
        caller = _Caller(self, self._runner.server())
        self._silent[caller.inside] = caller
        return caller

    @property
    def request_s(self) -> float:
        return self._request_s

    def left(self, caller: _Caller) -> None:
        self._silent.pop(caller.inside, None)

    def refuse(self, address: str) -> None:
        self._on_refused(address, f"it sent no whole request within {self._request_s:g} s")

    def _heed(self) -> Any:
        @web.middleware
        async def heed(request: web.Request, handler: Any) -> web.StreamResponse:
            caller = self._silent.pop(request.protocol, None)
            if caller is not None:
                caller.has_asked()
            response: web.StreamResponse = await handler(request)
            return response

        return heed


class _Caller(Through):
    """A connection, timed until its first request is whole."""

    def __init__(self, port: WebPort, inside: asyncio.Protocol) -> None:
        self._port, self.inside = port, inside
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._timer = asyncio.get_running_loop().call_later(self._port.request_s, self._give_up)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.has_asked()
        self._port.left(self)
        super().connection_lost(error)

    def has_asked(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._port.refuse(address_of(self._transport))
        self._transport.abort()


class _Told(logging.Handler):
    """Passes on what aiohttp has to say."""

    def __init__(self, on_refused: Callable[[str, str], None], on_error: Callable[[str], None]) -> None:
        super().__init__()
        self._on_refused, self._on_error = on_refused, on_error

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            address = record.args[0] if isinstance(record.args, tuple) and record.args else None
            self._on_refused(f"{address or 'somebody who left'}", "it does not speak HTTP as we do")
        elif record.levelno >= logging.ERROR and not isinstance(error, ConnectionError):
            self._on_error(f"a request failed here: {error!r}")


def _told(on_refused: Callable[[str, str], None], on_error: Callable[[str], None]) -> logging.Logger:
    logger = logging.Logger("ravnest.coordinator.web")  # of our own: others' settings are not touched
    logger.addHandler(_Told(on_refused, on_error))
    return logger
