"""The least that a server of WebSockets can cost: aiohttp alone, with the coordinator's TLS, doing nothing.

It welcomes whoever says something and answers nothing else, as our coordinator does not answer beats.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec
from aiohttp import WSMsgType, web

from benchmarks.control_child import answer
from ravnest.coordinator.people import People
from ravnest.core.control import MAX_MESSAGE_BYTES, Welcome
from ravnest.net.front import front_context


class Floor:
    """One port, at which nothing is done with what is heard."""

    def __init__(self, directory: Path) -> None:
        self._people = People(directory)
        self._heard = 0

    async def open(self, *, beat_s: float) -> int:
        """Answers with its port."""
        self._welcome = msgspec.msgpack.encode(Welcome(run="floor", beat_s=beat_s))
        app = web.Application()
        app.router.add_get("/v1/control", self._converse)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        context = front_context(self._people.identity)
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context, backlog=512)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def facts(self) -> dict[str, float]:
        return {"cpu_s": time.process_time(), "heard": self._heard}

    async def _converse(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        await socket.receive()
        await socket.send_bytes(self._welcome)
        while (await socket.receive()).type is WSMsgType.BINARY:
            self._heard += 1
        return socket


async def main() -> None:
    part = Floor(Path(sys.argv[1]))
    await answer({"open": part.open, "facts": part.facts})


if __name__ == "__main__":
    asyncio.run(main())
