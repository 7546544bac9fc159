"""Serves the pages over plain HTTP to programs of this host.

Connections are accepted at a bounded rate, and only while few are open. The others wait in the queue of the operating
system, where they cost this process nothing: it also feeds the data of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

from ravnest.coordinator.http.alpn_server import HttpProtocol
from ravnest.coordinator.http.limits import TokenBucket
from ravnest.dashboard.site import Access, DashboardData, bearer, make_site

__all__ = ["LocalListener"]

_HOST = "127.0.0.1"
_ACCEPTED_PER_S, _BURST = 20.0, 200.0  # connections; a browser opens six for a page
_MAX_CONNECTIONS = 256
_QUEUED = 64  # by the operating system
_REQUEST_S = 10.0  # for the first request of a connection
_PAUSE_S = 0.2

_logger = logging.getLogger("ravnest.dashboard")


class LocalListener:
    """Serves the pages to programs of this host only."""

    def __init__(self, data: DashboardData, access: Access) -> None:
        self.access = access
        app = make_site(data, lambda request: access.role_of(bearer(request)), hosts=self._hosts)
        self._http = HttpProtocol(
            app, request_s=_REQUEST_S, on_error=lambda text: _logger.error("%s", text),
            on_rejected=lambda address, reason: _logger.debug("rejected %s: %s", address, reason),
        )  # fmt: skip
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def _hosts(self) -> set[str]:
        return {f"{host}:{self.access.port}" for host in (_HOST, "localhost")}

    async def open(self, port: int | None = None) -> None:
        """Listen at `port`, else at that of the last start if it is free, else at any; raises `OSError`."""
        self._socket = listening = self._listen(port)
        self.access.port = listening.getsockname()[1]
        await self._http.open()
        self._accepting = asyncio.create_task(self._accept(listening))

    def _listen(self, port: int | None) -> socket.socket:
        if port is None and self.access.port:
            with contextlib.suppress(OSError):
                return _bound(self.access.port)
        return _bound(port or 0)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        bucket = TokenBucket(_ACCEPTED_PER_S, _BURST, time.monotonic())
        while True:
            if not bucket.take(time.monotonic()):
                await asyncio.sleep(bucket.wait_s(time.monotonic()))
            elif self._http.num_connections >= _MAX_CONNECTIONS:
                await asyncio.sleep(_PAUSE_S)
            else:
                try:
                    connection, _ = await loop.sock_accept(listening)
                    await loop.connect_accepted_socket(self._http, connection)
                except OSError:  # too many open files, or the client has gone
                    await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        if self._accepting is not None and self._socket is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._socket.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self._http.close()


def _bound(port: int) -> socket.socket:
    listening = socket.create_server((_HOST, port), backlog=_QUEUED)
    listening.setblocking(False)
    return listening
