"""A coordinator's port in a thread of its own, as small as it gets: a relay, and one web page."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from ravnest.net.deadline import Deadline
from ravnest.net.front import Front, FrontConfig, front_context
from ravnest.net.hello import RELAY_PROTOCOL
from ravnest.net.hub import HubConfig, RelayHub
from ravnest.net.tunnel import RelayInfo
from tests.net.kinds import DEADLINE_S, Members

T = TypeVar("T")

TOKEN = "a-token-of-some-length"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


class OnePage(asyncio.Protocol):
    """Says the same to everybody who asks for something."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(PAGE)
        self._transport.close()


class RelayServer:
    """Serves until it is left; `in_loop` asks something of the relay in the relay's own thread."""

    def __init__(
        self,
        members: Members,
        *,
        host: str = "127.0.0.1",
        hub: Callable[[Callable[[str, str], None]], HubConfig] = lambda tell: HubConfig(on_refused=tell),
        front: Callable[[Callable[[str, str], None]], FrontConfig] = lambda tell: FrontConfig(on_refused=tell),
        tap: Callable[[RelayHub], Callable[[], asyncio.Protocol]] = lambda hub: hub,
    ) -> None:
        self.refusals: queue.Queue[str] = queue.Queue()
        self.hub = RelayHub(hub(self._tell))
        by_protocol = {RELAY_PROTOCOL: tap(self.hub)}
        self.front = Front(front_context(members["coordinator"]), by_protocol, OnePage, front(self._tell))
        self._host = host
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._leaving = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _tell(self, address: str, reason: str) -> None:
        self.refusals.put(reason)

    def __enter__(self) -> RelayServer:
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._leaving.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def relay(self, token: str = TOKEN) -> RelayInfo:
        return RelayInfo(address=self.address, token=token)

    def open(self, token: str = TOKEN, names: tuple[str, str] = ("left", "right")) -> RelayInfo:
        self.in_loop(lambda: self.hub.open(token, names))
        return self.relay(token)

    def in_loop(self, ask: Callable[[], T]) -> T:
        async def asking() -> T:
            return ask()

        return asyncio.run_coroutine_threadsafe(asking(), self._loop).result(DEADLINE_S)

    def wait_empty(self) -> None:
        """Until all guests have left; the sockets at this end are closed then."""
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
        await self._leaving.wait()
        server.close()
        self.front.close()
        await server.wait_closed()
        await asyncio.sleep(0)  # closed transports tell their protocols in the next turn
        await asyncio.sleep(0)
