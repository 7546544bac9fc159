"""Baseline: a bare aiohttp WebSocket server with the coordinator's TLS, which ignores what it receives.

It answers the first message of a connection with a welcome and nothing else, as the coordinator does not answer
heartbeats.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
from aiohttp import WSMsgType, web

from benchmarks.control.child import serve
from ravnest.coordinator.certificates import CertificateAuthority
from ravnest.coordinator.http.alpn_server import server_context
from ravnest.protocol.control import MAX_MESSAGE_BYTES, Welcome


class BareServer:
    """A server that counts messages."""

    def __init__(self, directory: Path) -> None:
        self._authority = CertificateAuthority(directory)
        self._num_received = 0

    async def open(self, *, heartbeat_s: float) -> int:
        """Listen; returns the port."""
        self._welcome = msgspec.msgpack.encode(Welcome(run="bare-server", heartbeat_s=heartbeat_s))
        app = web.Application()
        app.router.add_get("/v1/control", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        context = server_context(self._authority.identity)
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context, backlog=512)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def facts(self) -> dict[str, float]:
        return {"cpu_s": time.process_time(), "received": self._num_received}

    async def _handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        await socket.receive()
        await socket.send_bytes(self._welcome)
        while (await socket.receive()).type is WSMsgType.BINARY:
            self._num_received += 1
        return socket


async def main() -> None:
    server = BareServer(Path(sys.argv[1]))
    await serve({"open": server.open, "facts": server.facts})


if __name__ == "__main__":
    asyncio.run(main())
