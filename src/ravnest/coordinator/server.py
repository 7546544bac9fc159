"""What the coordinator's one HTTPS port answers, each request checked for who asks.

    GET  /v1/authority                   the authority's certificate; its fingerprint is in the ticket
    POST /v1/enrol                       a token and a signing request for a certificate
    GET  /v1/control                     a node's conversation (WebSocket)                    members
    GET  /v1/blobs/DIGEST                a stage file or weights                              members
    PUT  /v1/weights/GENERATION/STAGE    a stage's weights come back                          members
    PUT  /v1/states/GENERATION/STAGE/N   all that a stage had learnt after N updates          members
    GET, POST /v1/line                   bytes, to measure a line with                        members
    GET  /v1/status                      where the run stands, as JSON                        token, member, requester
    POST /v1/kick, /v1/tickets           remove a node, invite more                           requester

Whoever is not allowed gets a sentence that says why.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..core.config import require
from ..core.errors import IdentityError
from ..net.identity import key_digest
from .bodies import PIECE_BYTES, read_json, receive_file, send_file, sending
from .clusters import LiveCluster
from .coordinator import Coordinator
from .decide import choose_name, judge_token
from .events import NodeEnrolled
from .patience import Patience
from .people import REQUESTER, People, address_of, name_of
from .sessions import converse
from .status import Status

__all__ = ["Office", "make_app"]

_MAX_BODY_BYTES = 64 * 1024
_PIECE = bytes(PIECE_BYTES)
_OTHERS = {int(HTTPStatus.REQUEST_ENTITY_TOO_LARGE): f"its request is over {_MAX_BODY_BYTES} bytes"}
_MEASURED_AT_ONCE, _MOST_MEASURE_S, _MOST_MEASURE_BYTES = 4, 3.0, 1 << 30


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


def make_app(coordinator: Coordinator, office: Office, patience: Patience) -> web.Application:
    desk = _Desk(coordinator, office, patience)
    app = web.Application(middlewares=[_sentences(coordinator)], client_max_size=_MAX_BODY_BYTES)
    app.router.add_get("/v1/authority", desk.authority)
    app.router.add_post("/v1/enrol", desk.enrol)
    app.router.add_get("/v1/control", desk.control)
    app.router.add_get("/v1/blobs/{digest}", desk.blob)
    app.router.add_put("/v1/weights/{generation:[0-9]{1,10}}/{stage:[0-9]{1,5}}", desk.weights)
    app.router.add_put("/v1/states/{generation:[0-9]{1,10}}/{stage:[0-9]{1,5}}/{updates:[0-9]{1,12}}", desk.state)
    app.router.add_get("/v1/line", desk.line_down)
    app.router.add_post("/v1/line", desk.line_up)
    app.router.add_get("/v1/status", desk.status)
    app.router.add_post("/v1/kick", desk.kick)
    app.router.add_post("/v1/tickets", desk.invite)
    return app


_STATE_FACTOR = 8  # sets of weights in all that a stage has learnt, at the most

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _sentences(coordinator: Coordinator) -> Any:
    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as refusal:
            reason, status = str(refusal), refusal.status
        except web.HTTPException as error:
            reason, status = _OTHERS.get(error.status, "it asked for what is not here"), error.status
        except TimeoutError:
            reason, status = "its request took too long", HTTPStatus.REQUEST_TIMEOUT
        except ValueError as error:
            reason, status = str(error), HTTPStatus.BAD_REQUEST
        coordinator.refused(address_of(request.transport), reason)
        return web.json_response({"error": reason}, status=status)

    return answer


class _Desk:
    """The handlers."""

    def __init__(self, coordinator: Coordinator, office: Office, patience: Patience) -> None:
        self._coordinator, self._office, self._patience = coordinator, office, patience
        self._measuring = asyncio.Semaphore(_MEASURED_AT_ONCE)

    async def authority(self, request: web.Request) -> web.Response:
        return web.Response(body=self._office.people.authority_pem, content_type="application/x-pem-file")

    async def enrol(self, request: web.Request) -> web.Response:
        asked = await read_json(request, _Enrol, within_s=self._patience.body_s)
        coordinator = self._coordinator
        refusal = judge_token(coordinator.state, asked.token, coordinator.now_s())
        if refusal is not None:
            raise Refusal(refusal)
        try:
            key = key_digest(asked.request.encode())
            name = choose_name(coordinator.state, asked.name, key)
            self._refuse_kicked(name)
            now = datetime.fromtimestamp(coordinator.now_s(), UTC)
            certificate = self._office.people.sign(asked.request.encode(), name, now)
        except IdentityError as error:
            raise Refusal(str(error), 400) from error
        coordinator.record(NodeEnrolled(coordinator.now_s(), name, key, asked.token))
        return web.json_response({
            "name": name, "certificate": certificate.decode(), "authority": self._office.people.authority_pem.decode(),
        })  # fmt: skip

    async def control(self, request: web.Request) -> web.StreamResponse:
        name, address = self._member(request), address_of(request.transport)
        return await converse(request, name, address, self._coordinator, self._patience)

    async def blob(self, request: web.Request) -> web.StreamResponse:
        self._member(request)
        found = self._coordinator.blobs.get(request.match_info["digest"])
        if found is None:
            raise Refusal("there is no such file: it is of an older plan", 404)
        with found.open("rb") if isinstance(found, Path) else BytesIO(found) as file:
            return await send_file(request, file, within_s=self._patience.body_s)

    async def weights(self, request: web.Request) -> web.Response:
        name, live, stage = self._stage(request)
        path = self._coordinator.requester.weights_path(live.id, stage)
        return await self._take_file(request, name, live, path, live.max_weights_bytes[stage])

    async def state(self, request: web.Request) -> web.Response:
        name, live, stage = self._stage(request)
        updates = int(request.match_info["updates"])
        path = self._coordinator.requester.state_path(live.id, stage, updates)
        if path is None:
            raise Refusal(f"no checkpoint of {live.id} after {updates} updates is being made", 409)
        return await self._take_file(request, name, live, path, _STATE_FACTOR * live.max_weights_bytes[stage])

    def _stage(self, request: web.Request) -> tuple[str, LiveCluster, int]:
        """Who it is, and of which cluster and stage, if it is what it says."""
        name = self._member(request)
        generation, stage = int(request.match_info["generation"]), int(request.match_info["stage"])
        live = self._coordinator.running.of(name)
        if live is None or live.generation != generation or live.stage_of(name) != stage:
            raise Refusal(f"{name} is not stage {stage} of generation {generation}", 409)
        return name, live, stage

    async def _take_file(
        self, request: web.Request, name: str, live: LiveCluster, path: Path, most: int
    ) -> web.Response:
        if request.content_length is not None and request.content_length > most:
            raise Refusal(f"weights of {request.content_length} bytes, at most {most} belong to this stage", 413)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")  # it may send them twice at once
        try:
            num_bytes = await receive_file(request, partial, most_bytes=most, within_s=self._patience.body_s)
            if live.is_over:
                raise Refusal(f"cluster {live.id} is no more: its weights are not needed", 409)
            partial.replace(path)
        except (TimeoutError, ConnectionError):  # the guest's doing, not the disk's
            raise
        except OSError as error:
            self._coordinator.note(f"the weights of {name} cannot be written to {path.name}: {error.strerror}")
            raise Refusal(f"the coordinator cannot write them: {error.strerror}", 507) from error
        finally:
            partial.unlink(missing_ok=True)
        return web.json_response({"bytes": num_bytes})

    async def line_down(self, request: web.Request) -> web.StreamResponse:
        self._member(request)
        until = time.monotonic() + min(float(request.query.get("seconds", "1")), _MOST_MEASURE_S)
        async with self._turn():
            response = web.StreamResponse()
            response.enable_chunked_encoding()
            await response.prepare(request)
            async with sending(request, within_s=self._patience.body_s):
                while time.monotonic() < until:
                    await response.write(_PIECE)
                await response.write_eof()
            return response

    async def line_up(self, request: web.Request) -> web.Response:
        self._member(request)
        async with self._turn():
            began, last, first_bytes, num_bytes = 0.0, 0.0, 0, 0
            async with asyncio.timeout(self._patience.body_s):
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
        asked = await read_json(request, _Kick, within_s=self._patience.body_s)
        self._coordinator.kick(asked.node, asked.reason[:200])
        return web.json_response({"kicked": asked.node})

    async def invite(self, request: web.Request) -> web.Response:
        self._requester(request)
        asked = await read_json(request, _Invite, within_s=self._patience.body_s)
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

    def _refuse_kicked(self, name: str) -> None:
        """Whoever was sent away gets no new certificate for the key it had."""
        if name in self._coordinator.state.members and (reason := self._coordinator.state.why_not_member(name)):
            raise Refusal(reason)

    def _requester(self, request: web.Request) -> None:
        if name_of(request.transport) != REQUESTER:
            raise Refusal("only the requester may do this, on the machine where the coordinator keeps its files")
