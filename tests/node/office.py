"""A coordinator that does as a test says: a real authority, TLS and HTTP, and a WebSocket for each node that comes."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from aiohttp import WSMsgType, web

from ravnest.core.control import MAX_MESSAGE_BYTES, Beat, Blob, Hello, LetGo, Said, Told, Welcome
from ravnest.net.front import front_context
from ravnest.net.identity import fingerprint
from ravnest.net.ticket import Ticket, new_token
from tests.net.kinds import YEAR, Members

T = TypeVar("T")

PATIENCE_S = 60.0


class Visit:
    """One node's conversation, from its hello."""

    def __init__(self, socket: web.WebSocketResponse, name: str) -> None:
        self.socket, self.name = socket, name
        self.hello: Hello | None = None
        self.is_over = asyncio.Event()

    async def tell(self, told: Told) -> None:
        await self.socket.send_bytes(msgspec.msgpack.encode(told))

    async def hear(self, kind: type[T]) -> T:
        """The next message that is no beat and no letting go; it must be of this kind."""
        said: Said | None = None
        while said is None or isinstance(said, Beat | LetGo):
            message = await self.socket.receive(PATIENCE_S)
            assert message.type is WSMsgType.BINARY, message
            said = msgspec.msgpack.decode(message.data, type=Said)
        assert isinstance(said, kind), said
        return said

    async def hear_beat(self) -> None:
        message = await self.socket.receive(PATIENCE_S)
        assert isinstance(msgspec.msgpack.decode(message.data, type=Said), Beat)

    async def close(self) -> None:
        await self.socket.close()
        self.is_over.set()


class Office:
    """Serves in the running loop until it is left."""

    def __init__(self, members: Members, *, shows: Members | None = None, port: int = 0) -> None:
        self.members, self._shows, self._port = members, shows or members, port
        self.token = new_token()
        self.heard: list[str] = []  # what was asked for, in order
        self.enrolled: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        self.weights: dict[str, bytes] = {}
        self.kicked: set[str] = set()
        self.num_busy = 0  # how often measuring is refused
        self.num_broken = 0  # how many files break off
        self.visits: asyncio.Queue[Visit] = asyncio.Queue()

    async def __aenter__(self) -> Office:
        app = web.Application()
        app.router.add_get("/v1/authority", self._authority)
        app.router.add_post("/v1/enrol", self._enrol)
        app.router.add_get("/v1/control", self._control)
        app.router.add_get("/v1/blobs/{digest}", self._blob)
        app.router.add_put("/v1/weights/{generation}/{stage}", self._take_weights)
        app.router.add_get("/v1/line", self._give)
        app.router.add_post("/v1/line", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        context: ssl.SSLContext = front_context(self.members["coordinator"])
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=context)
        await site.start()
        self.address: tuple[str, int] = self._runner.addresses[0][:2]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    def ticket(self, **changes: Any) -> Ticket:
        given = {
            "addresses": (self.address,), "fingerprint": fingerprint_of(self.members), "token": self.token,
        }  # fmt: skip
        return Ticket(**{**given, **changes})

    def keep(self, data: bytes) -> Blob:
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        self.blobs[blob.digest] = data
        return blob

    async def welcome(self) -> Visit:
        """The next node that says hello."""
        visit = await asyncio.wait_for(self.visits.get(), PATIENCE_S)
        visit.hello = await visit.hear(Hello)
        await visit.tell(Welcome(run="run", beat_s=0.5))
        return visit

    async def _authority(self, request: web.Request) -> web.Response:
        self.heard.append("authority")
        return web.Response(body=self._shows.authority.certificate_pem)

    async def _enrol(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.heard.append("enrol")
        self.enrolled.append(asked)
        if asked["token"] != self.token:
            return web.json_response({"error": "this ticket is not good any more"}, status=403)
        certificate = self.members.authority.sign(
            asked["request"].encode(), asked["name"], now=datetime.now(UTC), valid=YEAR
        )
        return web.json_response({
            "name": asked["name"], "certificate": certificate.decode(),
            "authority": self.members.authority.certificate_pem.decode(),
        })  # fmt: skip

    async def _control(self, request: web.Request) -> web.StreamResponse:
        if _name(request) in self.kicked:
            return web.json_response({"error": "it was kicked"}, status=403)
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, timeout=0.5)
        await socket.prepare(request)
        visit = Visit(socket, _name(request))
        self.visits.put_nowait(visit)
        await visit.is_over.wait()
        return socket

    async def _blob(self, request: web.Request) -> web.Response:
        self.heard.append("blob")
        if self.num_broken and request.transport is not None:
            self.num_broken -= 1
            request.transport.close()
        found = self.blobs.get(request.match_info["digest"])
        return web.Response(body=found) if found is not None else web.json_response({"error": "no"}, status=404)

    async def _take_weights(self, request: web.Request) -> web.Response:
        key = f"{_name(request)} {request.match_info['generation']} {request.match_info['stage']}"
        self.weights[key] = await request.read()
        return web.json_response({})

    async def _give(self, request: web.Request) -> web.StreamResponse:
        if self.num_busy:
            self.num_busy -= 1
            return web.json_response({"error": "others measure"}, status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(50):
            await response.write(bytes(20_000))
            await asyncio.sleep(0.002)
        return response

    async def _take(self, request: web.Request) -> web.Response:
        num_bytes = 0
        async for chunk in request.content.iter_any():
            num_bytes += len(chunk)
        return web.json_response({"bytes_per_s": float(num_bytes)})


def fingerprint_of(members: Members) -> str:
    return fingerprint(members.authority.certificate_pem)


def _name(request: web.Request) -> str:
    """Whose certificate was shown."""
    assert request.transport is not None
    certificate: Any = request.transport.get_extra_info("peercert") or {}
    return str(next((value for part in certificate.get("subject", ()) for key, value in part), ""))
