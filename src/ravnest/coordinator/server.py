"""What the coordinator's one HTTPS port answers, each request checked for who asks.

    GET  /v1/authority                   the authority's certificate; its fingerprint is in the ticket
    POST /v1/enrol                       a token and a signing request for a certificate
    GET  /v1/control                     a node's conversation (WebSocket)                    members
    GET  /v1/blobs/DIGEST                a stage file or weights                              members
    PUT  /v1/weights/GENERATION/STAGE    a stage's weights come back                          members
    GET, POST /v1/line                   bytes, to measure a line with                        members
    GET  /v1/status                      where the run stands, as JSON                        token, member, requester
    POST /v1/kick, /v1/tickets           remove a node, invite more                           requester

Whoever is not allowed gets a sentence that says why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..core.config import require
from ..core.errors import IdentityError
from ..net.addresses import plain_host, show
from ..net.identity import key_digest
from .coordinator import Coordinator
from .decide import choose_name, judge_token
from .events import NodeEnrolled
from .people import REQUESTER, People, name_of
from .sessions import converse
from .status import Status

__all__ = ["Office", "make_app"]

_MAX_BODY_BYTES = 64 * 1024
_CHUNK = bytes(64 * 1024)
_MEASURED_AT_ONCE, _MOST_MEASURE_S, _MOST_MEASURE_BYTES = 4, 3.0, 1 << 30
_BODY_S = 30.0


class Office(Protocol):
    """What the server needs besides the coordinator."""

    people: People

    def status(self) -> Status: ...

    def new_ticket(self, expires_s: float, uses: int | None) -> str: ...


class _Enrol(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    name: str
    request: str
    release: str = ""


class _Kick(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    reason: str = "no reason was given"


class _Invite(msgspec.Struct, forbid_unknown_fields=True):
    expires_s: float
    uses: int | None = None


class Refusal(Exception):
    """A request that gets a sentence instead."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


def make_app(coordinator: Coordinator, office: Office) -> web.Application:
    desk = _Desk(coordinator, office)
    app = web.Application(middlewares=[_sentences(coordinator)], client_max_size=_MAX_BODY_BYTES)
    app.router.add_get("/v1/authority", desk.authority)
    app.router.add_post("/v1/enrol", desk.enrol)
    app.router.add_get("/v1/control", desk.control)
    app.router.add_get("/v1/blobs/{digest}", desk.blob)
    app.router.add_put("/v1/weights/{generation:[0-9]{1,10}}/{stage:[0-9]{1,5}}", desk.weights)
    app.router.add_get("/v1/line", desk.line_down)
    app.router.add_post("/v1/line", desk.line_up)
    app.router.add_get("/v1/status", desk.status)
    app.router.add_post("/v1/kick", desk.kick)
    app.router.add_post("/v1/tickets", desk.invite)
    return app


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _sentences(coordinator: Coordinator) -> Any:
    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as refusal:
            coordinator.refused(_address(request), str(refusal))
            return web.json_response({"error": str(refusal)}, status=refusal.status)
        except (ValueError, TimeoutError) as error:
            return web.json_response({"error": str(error) or "it took too long"}, status=400)

    return answer


def _address(request: web.Request) -> str:
    at = request.transport.get_extra_info("peername") if request.transport is not None else None
    return show((plain_host(at[0]), at[1])) if at else "somebody who left"


class _Desk:
    """The handlers."""

    def __init__(self, coordinator: Coordinator, office: Office) -> None:
        self._coordinator, self._office = coordinator, office
        self._measuring = asyncio.Semaphore(_MEASURED_AT_ONCE)

    async def authority(self, request: web.Request) -> web.Response:
        return web.Response(body=self._office.people.authority_pem, content_type="application/x-pem-file")

    async def enrol(self, request: web.Request) -> web.Response:
        asked = await _body(request, _Enrol)
        coordinator = self._coordinator
        refusal = judge_token(coordinator.state, asked.token, coordinator.now_s())
        if refusal is not None:
            raise Refusal(refusal)
        try:
            key = key_digest(asked.request.encode())
            name = choose_name(coordinator.state, asked.name, key)
            certificate = self._office.people.sign(asked.request.encode(), name)
        except IdentityError as error:
            raise Refusal(str(error), 400) from error
        coordinator.record(NodeEnrolled(coordinator.now_s(), name, key, asked.token))
        return web.json_response({
            "name": name, "certificate": certificate.decode(), "authority": self._office.people.authority_pem.decode(),
        })  # fmt: skip

    async def control(self, request: web.Request) -> web.StreamResponse:
        return await converse(request, self._member(request), _address(request), self._coordinator)

    async def blob(self, request: web.Request) -> web.StreamResponse:
        self._member(request)
        found = self._coordinator.blobs.get(request.match_info["digest"])
        if found is None:
            raise Refusal("there is no such file: it is of an older plan", 404)
        return web.FileResponse(found) if isinstance(found, Path) else web.Response(body=found)

    async def weights(self, request: web.Request) -> web.Response:
        name = self._member(request)
        generation, stage = int(request.match_info["generation"]), int(request.match_info["stage"])
        live = self._coordinator.cluster_of(name)
        if live is None or live.generation != generation or live.stage_of(name) != stage:
            raise Refusal(f"{name} is not stage {stage} of generation {generation}", 409)
        most = live.max_weights_bytes[stage]
        if request.content_length is not None and request.content_length > most:
            raise Refusal(f"weights of {request.content_length} bytes, at most {most} belong to this stage", 413)
        path = self._coordinator.requester.weights_path(live.id, stage)
        try:
            await _receive(request, path, most)
        except OSError as error:
            self._coordinator.note(f"the weights of {name} cannot be written to {path}: {error.strerror}")
            raise Refusal(f"the coordinator cannot write them: {error.strerror}", 507) from error
        return web.json_response({"bytes": path.stat().st_size})

    async def line_down(self, request: web.Request) -> web.StreamResponse:
        self._member(request)
        until = time.monotonic() + min(float(request.query.get("seconds", "1")), _MOST_MEASURE_S)
        async with self._turn():
            response = web.StreamResponse()
            response.enable_chunked_encoding()
            await response.prepare(request)
            while time.monotonic() < until:
                await response.write(_CHUNK)
            await response.write_eof()
            return response

    async def line_up(self, request: web.Request) -> web.Response:
        self._member(request)
        async with self._turn():
            began, last, first_bytes, num_bytes = 0.0, 0.0, 0, 0
            async with asyncio.timeout(_BODY_S):
                async for chunk in request.content.iter_any():
                    num_bytes += len(chunk)
                    last = time.monotonic()
                    if not began:  # what was on its way before counts neither as bytes nor as time
                        began, first_bytes = last, num_bytes
                    require(num_bytes <= _MOST_MEASURE_BYTES, "this is more than a measurement needs")
            return web.json_response({"bytes_per_s": (num_bytes - first_bytes) / max(last - began, 1e-6)})

    def _turn(self) -> asyncio.Semaphore:
        if self._measuring.locked():
            raise Refusal("others measure their lines now: try again in a moment", 503)
        return self._measuring

    async def status(self, request: web.Request) -> web.Response:
        coordinator = self._coordinator
        if name_of(request.transport) is None:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            refusal = judge_token(coordinator.state, token, coordinator.now_s(), counts=False)
            if scheme != "Bearer" or refusal is not None:
                raise Refusal(refusal or "show a ticket to see the status")
        else:
            self._known(request)
        return web.Response(body=msgspec.json.encode(self._office.status()), content_type="application/json")

    async def kick(self, request: web.Request) -> web.Response:
        self._requester(request)
        asked = await _body(request, _Kick)
        self._coordinator.kick(asked.node, asked.reason[:200])
        return web.json_response({"kicked": asked.node})

    async def invite(self, request: web.Request) -> web.Response:
        self._requester(request)
        asked = await _body(request, _Invite)
        return web.json_response({"ticket": self._office.new_ticket(asked.expires_s, asked.uses)})

    def _member(self, request: web.Request) -> str:
        name = self._known(request)
        if name == REQUESTER:
            raise Refusal("the requester is no node")
        return name

    def _known(self, request: web.Request) -> str:
        name = name_of(request.transport)
        if name is None:
            raise Refusal("this is for members: join with a ticket", 401)
        if name == REQUESTER:
            return name
        reason = self._coordinator.state.why_not_member(name)
        if reason is not None:
            raise Refusal(reason)
        return name

    def _requester(self, request: web.Request) -> None:
        if name_of(request.transport) != REQUESTER:
            raise Refusal("only the requester may do this, on the machine where the coordinator keeps its files")


async def _body(request: web.Request, kind: type[Any]) -> Any:
    async with asyncio.timeout(_BODY_S):
        return msgspec.json.decode(await request.read(), type=kind)


async def _chunk(request: web.Request) -> bytes:
    """Some bytes of a body, which may take long as a whole but not in any part; none at its end."""
    async with asyncio.timeout(_BODY_S):
        return await request.content.readany()


async def _receive(request: web.Request, path: Path, most_bytes: int) -> None:
    """Write a body to a file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    num_bytes = 0
    try:
        with partial.open("wb") as file:
            while chunk := await _chunk(request):
                num_bytes += len(chunk)
                require(num_bytes <= most_bytes, f"more than the {most_bytes} bytes that belong to this stage")
                file.write(chunk)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
