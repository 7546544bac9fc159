"""A minimal coordinator's port in a thread of its own: a relay, and one web page."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from ravnest.coordinator.http.alpn_server import AlpnServer, AlpnServerConfig, server_context
from ravnest.core.clock import Deadline
from ravnest.protocol.relay import RELAY_PROTOCOL
from ravnest.transport.p2p.relay_client import RelayInfo
from ravnest.transport.p2p.relay_server import RelayServer, RelayServerConfig
from tests.unit.transport.kinds import DEADLINE_S, Members

T = TypeVar("T")

TOKEN = "a-token-of-some-length"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


class OnePage(asyncio.Protocol):
    """Answers every request with the same page."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(PAGE)
        self._transport.close()


class RelayFixture:
    """Serves inside its `with` block; `in_loop` calls a function in the relay's thread."""

    def __init__(
        self,
        members: Members,
        *,
        host: str = "127.0.0.1",
        relay: Callable[[Callable[[str, str], None]], RelayServerConfig] = lambda report: RelayServerConfig(
            on_rejected=report
        ),
        front: Callable[[Callable[[str, str], None]], AlpnServerConfig] = lambda report: AlpnServerConfig(
            on_rejected=report
        ),
        tap: Callable[[RelayServer], Callable[[], asyncio.Protocol]] = lambda server: server,
    ) -> None:
        self.rejections: queue.Queue[str] = queue.Queue()
        self.server = RelayServer(relay(self._report))
        by_protocol = {RELAY_PROTOCOL: tap(self.server)}
        self.front = AlpnServer(server_context(members["coordinator"]), by_protocol, OnePage, front(self._report))
        self._host = host
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _report(self, address: str, reason: str) -> None:
        self.rejections.put(reason)

    def __enter__(self) -> RelayFixture:
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def info(self, token: str = TOKEN) -> RelayInfo:
        return RelayInfo(address=self.address, token=token)

    def open(self, token: str = TOKEN, names: tuple[str, str] = ("left", "right")) -> RelayInfo:
        self.in_loop(lambda: self.server.open(token, names))
        return self.info(token)

    def in_loop(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(DEADLINE_S)

    def wait_empty(self) -> None:
        """Wait until all clients have disconnected and the sockets at this end are closed."""
        deadline = Deadline(DEADLINE_S)
        while self.in_loop(lambda: self.front.num_connections):
            assert not deadline.passed()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.get_running_loop().create_server(self.front, self._host, 0, backlog=1024)
        self.address: tuple[str, int] = server.sockets[0].getsockname()[:2]
        self._ready.set()
        await self._closing.wait()
        server.close()
        self.front.close()
        await server.wait_closed()
        await asyncio.sleep(0)  # closed transports notify their protocols in the next iteration
        await asyncio.sleep(0)
