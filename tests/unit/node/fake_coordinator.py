"""A coordinator that tests control: a real authority, TLS and HTTP, and a WebSocket for each node."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from aiohttp import WSMsgType, web

from ravnest.coordinator.http.alpn_server import server_context
from ravnest.protocol.control import (
    MAX_MESSAGE_BYTES,
    AssignmentReleased,
    Blob,
    FromCoordinator,
    FromNode,
    Heartbeat,
    Hello,
    Welcome,
)
from ravnest.transport.identity import fingerprint
from ravnest.transport.ticket import Ticket, new_token
from tests.unit.transport.kinds import YEAR, Members

T = TypeVar("T")

TIMEOUT_S = 60.0


class NodeSession:
    """The session of one node."""

    def __init__(self, socket: web.WebSocketResponse, name: str) -> None:
        self.socket, self.name = socket, name
        self.hello: Hello | None = None
        self.is_over = asyncio.Event()

    async def send(self, message: FromCoordinator) -> None:
        await self.socket.send_bytes(msgspec.msgpack.encode(message))

    async def receive(self, kind: type[T]) -> T:
        """Return the next message, without heartbeats and releases; it must be of this kind."""
        message: FromNode | None = None
        while message is None or isinstance(message, Heartbeat | AssignmentReleased):
            frame = await self.socket.receive(TIMEOUT_S)
            assert frame.type is WSMsgType.BINARY, frame
            message = msgspec.msgpack.decode(frame.data, type=FromNode)
        assert isinstance(message, kind), message
        return message

    async def receive_heartbeat(self) -> None:
        frame = await self.socket.receive(TIMEOUT_S)
        assert isinstance(msgspec.msgpack.decode(frame.data, type=FromNode), Heartbeat)

    async def close(self) -> None:
        await self.socket.close()
        self.is_over.set()


class FakeCoordinator:
    """Serves in the running loop as an asynchronous context manager."""

    def __init__(self, members: Members, *, shows: Members | None = None, port: int = 0) -> None:
        self.members, self._shows, self._port = members, shows or members, port
        self.token = new_token()
        self.requests: list[str] = []
        self.enrolled: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        self.weights: dict[str, bytes] = {}
        self.kicked: set[str] = set()
        self.num_busy = 0  # how many measurements are rejected
        self.line_bytes = 0  # received in measurements
        self.num_cut = 0  # how many downloads are cut off
        self.sessions: asyncio.Queue[NodeSession] = asyncio.Queue()

    async def __aenter__(self) -> FakeCoordinator:
        app = web.Application()
        app.router.add_get("/v1/authority", self._authority)
        app.router.add_post("/v1/enrol", self._enrol)
        app.router.add_get("/v1/control", self._control)
        app.router.add_get("/v1/blobs/{digest}", self._blob)
        app.router.add_put("/v1/weights/{generation}/{stage}", self._receive_weights)
        app.router.add_get("/v1/line", self._download)
        app.router.add_post("/v1/line", self._upload)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        context: ssl.SSLContext = server_context(self.members["coordinator"])
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=context)
        await site.start()
        self.address: tuple[str, int] = self._runner.addresses[0][:2]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    def ticket(self, **changes: Any) -> Ticket:
        fields = {
            "addresses": (self.address,), "fingerprint": fingerprint_of(self.members), "token": self.token,
        }  # fmt: skip
        return Ticket(**{**fields, **changes})

    def add_blob(self, data: bytes) -> Blob:
        blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
        self.blobs[blob.digest] = data
        return blob

    async def admit(self) -> NodeSession:
        """Admit the next node."""
        session = await asyncio.wait_for(self.sessions.get(), TIMEOUT_S)
        session.hello = await session.receive(Hello)
        await session.send(Welcome(run="run", heartbeat_s=0.5))
        return session

    async def _authority(self, request: web.Request) -> web.Response:
        self.requests.append("authority")
        return web.Response(body=self._shows.authority.certificate_pem)

    async def _enrol(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append("enrol")
        self.enrolled.append(body)
        if body["token"] != self.token:
            return web.json_response({"error": "this ticket has expired"}, status=403)
        certificate = self.members.authority.sign(
            body["request"].encode(), body["name"], now=datetime.now(UTC), valid=YEAR
        )
        return web.json_response({
            "name": body["name"], "certificate": certificate.decode(),
            "authority": self.members.authority.certificate_pem.decode(),
        })  # fmt: skip

    async def _control(self, request: web.Request) -> web.StreamResponse:
        if _name(request) in self.kicked:
            return web.json_response({"error": "it was kicked"}, status=403)
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, timeout=0.5)
        await socket.prepare(request)
        session = NodeSession(socket, _name(request))
        self.sessions.put_nowait(session)
        await session.is_over.wait()
        return socket

    async def _blob(self, request: web.Request) -> web.Response:
        self.requests.append("blob")
        if self.num_cut and request.transport is not None:
            self.num_cut -= 1
            request.transport.close()
        blob = self.blobs.get(request.match_info["digest"])
        return web.Response(body=blob) if blob is not None else web.json_response({"error": "no such blob"}, status=404)

    async def _receive_weights(self, request: web.Request) -> web.Response:
        key = f"{_name(request)} {request.match_info['generation']} {request.match_info['stage']}"
        self.weights[key] = await request.read()
        return web.json_response({})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("seconds") == "0":
            return web.Response()
        if self.num_busy:
            self.num_busy -= 1
            return web.json_response({"error": "another measurement is in progress"}, status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(50):
            await response.write(bytes(20_000))
            await asyncio.sleep(0.002)
        return response

    async def _upload(self, request: web.Request) -> web.Response:
        async for chunk in request.content.iter_any():
            self.line_bytes += len(chunk)
        return web.json_response({"bytes_per_s": 2e6})


def fingerprint_of(members: Members) -> str:
    return fingerprint(members.authority.certificate_pem)


def _name(request: web.Request) -> str:
    """Return the name in the client's certificate."""
    assert request.transport is not None
    certificate: Any = request.transport.get_extra_info("peercert") or {}
    return str(next((value for part in certificate.get("subject", ()) for key, value in part), ""))
