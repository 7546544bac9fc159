"""HTTP API of the coordinator's port. Every request is authorized.

    GET  /v1/authority                   certificate of the authority; its fingerprint is in the ticket
    POST /v1/enrol                       a certificate for a token and a signing request
    GET  /v1/control                     session of a node (WebSocket)                        members
    GET  /v1/blobs/DIGEST                a stage file or weights                              members
    PUT  /v1/weights/GENERATION/STAGE    upload of the weights of a stage                     members
    PUT  /v1/states/GENERATION/STAGE/N   upload of the whole state of a stage after N updates members
    GET, POST /v1/line                   bytes to measure bandwidth                           members
    GET  /v1/status                      status of the run, as JSON                           token, member, requester
    POST /v1/predict                     the next token of a prompt                           token, member, requester
    POST /v1/kick, /v1/tickets           remove a node, issue a ticket                        requester

A rejected request gets the reason as JSON. Bodies are streamed in chunks, with a timeout per chunk, so that a stalled
client occupies one chunk for a limited time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar

import msgspec
from aiohttp import web

from ravnest.coordinator.certificates import REQUESTER, CertificateAuthority, address_of, is_local, name_of
from ravnest.coordinator.clusters import ActiveCluster
from ravnest.coordinator.context import STATE_FACTOR
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.events import NodeEnrolled
from ravnest.coordinator.http.limits import HttpTimeouts
from ravnest.coordinator.http.session import run_session
from ravnest.coordinator.policy.membership import choose_name, token_rejection
from ravnest.coordinator.status import RunStatus
from ravnest.core.config import require
from ravnest.errors import IdentityError
from ravnest.profiling.bandwidth import LineEndpoint
from ravnest.protocol.control import FILE_HEADER, NODE_HEADER
from ravnest.transport.identity import key_digest

__all__ = ["make_app", "role_of"]

T = TypeVar("T")

CHUNK_BYTES = 64 * 1024


# Bodies.


async def read_json(request: web.Request, kind: type[T], *, timeout_s: float) -> T:
    """Decode a short body; raises `ValueError` if it is invalid."""
    async with asyncio.timeout(timeout_s):
        return msgspec.json.decode(await request.read(), type=kind)


async def receive_file(request: web.Request, path: Path, *, max_bytes: int, timeout_s: float) -> int:
    """Write a body to a file; returns its size. The timeout is per chunk."""
    num_bytes = 0
    with path.open("wb") as file:
        while True:
            async with asyncio.timeout(timeout_s):
                chunk = await request.content.readany()
            if not chunk:
                return num_bytes
            num_bytes += len(chunk)
            require(num_bytes <= max_bytes, f"the body is larger than {max_bytes} bytes, the limit of this stage")
            file.write(chunk)


async def send_file(request: web.Request, file: BinaryIO, *, timeout_s: float) -> web.StreamResponse:
    """Respond with a file. The timeout is per chunk."""
    response = web.StreamResponse()
    response.content_length = file.seek(0, SEEK_END)
    file.seek(0)
    await response.prepare(request)
    while chunk := file.read(CHUNK_BYTES):
        async with sending(request, timeout_s=timeout_s):
            await response.write(chunk)
    await response.write_eof()
    return response


@contextlib.asynccontextmanager
async def sending(request: web.Request, *, timeout_s: float) -> AsyncIterator[None]:
    """Abort the connection if the client does not receive within the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise


# Requests.

_MAX_BODY_BYTES = 64 * 1024
_CHUNK = bytes(CHUNK_BYTES)
_REASONS = {int(HTTPStatus.REQUEST_ENTITY_TOO_LARGE): f"the request is larger than {_MAX_BODY_BYTES} bytes"}
_MAX_MEASUREMENTS = 4  # of bandwidth, at once
_PREDICTION_S = 120.0


class ServerContext(Protocol):
    """The part of a `CoordinatorServer` that the handlers use."""

    @property
    def authority(self) -> CertificateAuthority: ...

    def status(self) -> RunStatus: ...

    def new_ticket(self, expires_s: float, uses: int | None) -> str: ...


class _EnrollRequest(msgspec.Struct, forbid_unknown_fields=True):
    token: str
    name: str
    request: str
    release: str = ""


class _KickRequest(msgspec.Struct, forbid_unknown_fields=True):
    node: str
    reason: str = "no reason given"


class _TicketRequest(msgspec.Struct, forbid_unknown_fields=True):
    expires_s: float
    uses: int | None = None


class _PredictRequest(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]


class HttpRejection(Exception):
    """A rejected request; the client gets the reason."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


def make_app(coordinator: Coordinator, context: ServerContext, timeouts: HttpTimeouts) -> web.Application:
    handlers = _Handlers(coordinator, context, timeouts)
    app = web.Application(middlewares=[_reasons(coordinator)], client_max_size=_MAX_BODY_BYTES)
    app.router.add_get("/v1/authority", handlers.authority)
    app.router.add_post("/v1/enrol", handlers.enrol)
    app.router.add_get("/v1/control", handlers.control)
    app.router.add_get("/v1/blobs/{digest}", handlers.blob)
    app.router.add_put("/v1/weights/{generation:[0-9]{1,10}}/{stage:[0-9]{1,5}}", handlers.weights)
    app.router.add_put("/v1/states/{generation:[0-9]{1,10}}/{stage:[0-9]{1,5}}/{updates:[0-9]{1,12}}", handlers.state)
    app.router.add_get("/v1/line", handlers.line_down)
    app.router.add_post("/v1/line", handlers.line_up)
    app.router.add_get("/v1/address", handlers.address)
    app.router.add_get("/v1/status", handlers.status)
    app.router.add_post("/v1/predict", handlers.predict)
    app.router.add_post("/v1/kick", handlers.kick)
    app.router.add_post("/v1/tickets", handlers.invite)
    return app


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _reasons(coordinator: Coordinator) -> Any:
    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except HttpRejection as rejection:
            reason, status = str(rejection), rejection.status
        except web.HTTPException as error:
            reason, status = _REASONS.get(error.status, "no such resource"), error.status
        except TimeoutError:
            reason, status = "the request timed out", HTTPStatus.REQUEST_TIMEOUT
        except ValueError as error:
            reason, status = str(error), HTTPStatus.BAD_REQUEST
        coordinator.log_rejection(address_of(request.transport), reason)
        return web.json_response({"error": reason}, status=status)

    return answer


class _Handlers:
    """Request handlers."""

    def __init__(self, coordinator: Coordinator, context: ServerContext, timeouts: HttpTimeouts) -> None:
        self._coordinator, self._context, self._timeouts = coordinator, context, timeouts
        self._predicting = asyncio.Lock()
        self._line = LineEndpoint(timeout_s=timeouts.body_s, max_concurrent=_MAX_MEASUREMENTS)

    async def authority(self, request: web.Request) -> web.Response:
        return web.Response(body=self._context.authority.authority_pem, content_type="application/x-pem-file")

    async def enrol(self, request: web.Request) -> web.Response:
        body = await read_json(request, _EnrollRequest, timeout_s=self._timeouts.body_s)
        coordinator = self._coordinator
        rejection = token_rejection(coordinator.state, body.token, coordinator.now_s())
        if rejection is not None:
            raise HttpRejection(rejection)
        try:
            key = key_digest(body.request.encode())
            name = choose_name(coordinator.state, body.name, key)
            self._reject_kicked(name)
            now = datetime.fromtimestamp(coordinator.now_s(), UTC)
            certificate = self._context.authority.sign(body.request.encode(), name, now)
        except IdentityError as error:
            raise HttpRejection(str(error), 400) from error
        coordinator.record(NodeEnrolled(coordinator.now_s(), name, key, body.token))
        return web.json_response({
            "name": name, "certificate": certificate.decode(),
            "authority": self._context.authority.authority_pem.decode(),
        })  # fmt: skip

    async def control(self, request: web.Request) -> web.StreamResponse:
        name, address = self._member(request), address_of(request.transport)
        return await run_session(request, name, address, self._coordinator, self._timeouts)

    async def blob(self, request: web.Request) -> web.StreamResponse:
        self._member(request)
        found = self._coordinator.blobs.get(request.match_info["digest"])
        if found is None:
            raise HttpRejection("no such file: it may belong to an earlier plan", 404)
        if isinstance(found, Path) and is_local(request.transport):
            return web.Response(headers={FILE_HEADER: str(found)})
        with found.open("rb") if isinstance(found, Path) else BytesIO(found) as file:
            return await send_file(request, file, timeout_s=self._timeouts.body_s)

    async def weights(self, request: web.Request) -> web.Response:
        name, live, stage = self._stage(request)
        path = self._coordinator.requester.weights_path(live.id, stage)
        return await self._receive_file(request, name, live, path, live.max_weights_bytes[stage])

    async def state(self, request: web.Request) -> web.Response:
        name, live, stage = self._stage(request)
        updates = int(request.match_info["updates"])
        path = self._coordinator.requester.state_path(live.id, stage, updates)
        if path is None:
            raise HttpRejection(f"no checkpoint of cluster {live.id} is taken after {updates} updates", 409)
        return await self._receive_file(request, name, live, path, STATE_FACTOR * live.max_weights_bytes[stage])

    def _stage(self, request: web.Request) -> tuple[str, ActiveCluster, int]:
        """The node, its cluster and its stage, checked against the URL."""
        name = self._member(request)
        generation, stage = int(request.match_info["generation"]), int(request.match_info["stage"])
        live = self._coordinator.running.cluster_of(name)
        if live is None or live.generation != generation or live.stage_of(name) != stage:
            raise HttpRejection(f"{name} is not stage {stage} of generation {generation}", 409)
        return name, live, stage

    async def _receive_file(
        self, request: web.Request, name: str, live: ActiveCluster, path: Path, max_bytes: int
    ) -> web.Response:
        if request.content_length is not None and request.content_length > max_bytes:
            raise HttpRejection(
                f"the body has {request.content_length} bytes, the limit of this stage is {max_bytes}", 413
            )
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")  # uploads may overlap
        try:
            if (local := _local_file(request)) is not None:
                num_bytes = await asyncio.to_thread(_take_over, local, partial)
            else:
                num_bytes = await receive_file(request, partial, max_bytes=max_bytes, timeout_s=self._timeouts.body_s)
            if live.is_over:
                raise HttpRejection(f"cluster {live.id} has ended: its weights are not needed", 409)
            partial.replace(path)
        except (TimeoutError, ConnectionError):  # caused by the client, not by the disk
            raise
        except OSError as error:
            self._coordinator.note(f"cannot write the weights of {name} to {path.name}: {error.strerror}")
            raise HttpRejection(f"the coordinator cannot write the file: {error.strerror}", 507) from error
        finally:
            partial.unlink(missing_ok=True)
        return web.json_response({"bytes": num_bytes})

    async def address(self, request: web.Request) -> web.Response:
        """Answer with the client's address as it is seen here, and the time of this clock."""
        self._reader(request)
        return web.json_response({"address": address_of(request.transport), "time_s": self._coordinator.now_s()})

    async def line_down(self, request: web.Request) -> web.StreamResponse:
        self._reader(request)
        return await self._line.download(request)

    async def line_up(self, request: web.Request) -> web.Response:
        self._reader(request)
        return await self._line.upload(request)

    async def predict(self, request: web.Request) -> web.Response:
        self._reader(request)
        body = await read_json(request, _PredictRequest, timeout_s=self._timeouts.body_s)
        if self._predicting.locked():
            raise HttpRejection("another request is being answered: try again", HTTPStatus.SERVICE_UNAVAILABLE)
        async with self._predicting:
            tokens, scores = await self._coordinator.running.predict(body.tokens, _PREDICTION_S)
        return web.json_response({"tokens": tokens, "scores": scores})

    def _reader(self, request: web.Request) -> None:
        """Admit members, the requester, and holders of a ticket."""
        if _name(request) is not None:
            self._known(request)
            return
        rejection = _ticket_rejection(request, self._coordinator)
        if rejection is not None:
            raise HttpRejection(rejection)

    async def status(self, request: web.Request) -> web.Response:
        self._reader(request)
        return web.Response(body=msgspec.json.encode(self._context.status()), content_type="application/json")

    async def kick(self, request: web.Request) -> web.Response:
        self._requester(request)
        body = await read_json(request, _KickRequest, timeout_s=self._timeouts.body_s)
        self._coordinator.kick(body.node, body.reason[:200])
        return web.json_response({"kicked": body.node})

    async def invite(self, request: web.Request) -> web.Response:
        self._requester(request)
        body = await read_json(request, _TicketRequest, timeout_s=self._timeouts.body_s)
        return web.json_response({"ticket": self._context.new_ticket(body.expires_s, body.uses)})

    def _member(self, request: web.Request) -> str:
        name = self._known(request)
        if name == REQUESTER:
            raise HttpRejection("the requester is not a node")
        return name

    def _known(self, request: web.Request) -> str:
        name = _name(request)
        if name is None:
            raise HttpRejection("members only: join with a ticket", 401)
        if name == REQUESTER:
            return name
        reason = self._coordinator.state.rejection_reason(name)
        if reason is not None:
            raise HttpRejection(reason)
        return name

    def _reject_kicked(self, name: str) -> None:
        """A kicked node gets no new certificate for its key."""
        if name in self._coordinator.state.members and (reason := self._coordinator.state.rejection_reason(name)):
            raise HttpRejection(reason)

    def _requester(self, request: web.Request) -> None:
        if _name(request) != REQUESTER:
            raise HttpRejection("only the requester may do this, on the machine with the coordinator's directory")


def role_of(request: web.Request, coordinator: Coordinator) -> Literal["requester", "viewer"] | None:
    """Return what a client of the port may see: members and holders of a ticket are viewers."""
    name = _name(request)
    if name == REQUESTER:
        return "requester"
    if name is not None:
        return "viewer" if coordinator.state.rejection_reason(name) is None else None
    return "viewer" if _ticket_rejection(request, coordinator) is None else None


def _ticket_rejection(request: web.Request, coordinator: Coordinator) -> str | None:
    """Return the reason why the ticket in a request's header is not valid; None if it is."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme != "Bearer":
        return "a ticket is needed for this"
    return token_rejection(coordinator.state, token, coordinator.now_s(), check_uses=False)


def _name(request: web.Request) -> str | None:
    """Return the client's name: from its certificate, or as a process of this user states it on a unix socket."""
    if is_local(request.transport):
        return request.headers.get(NODE_HEADER)
    return name_of(request.transport)


def _local_file(request: web.Request) -> Path | None:
    """Return the file that a process of this user offers instead of a body."""
    path = request.headers.get(FILE_HEADER)
    return Path(path) if path is not None and is_local(request.transport) else None


def _take_over(path: Path, to: Path) -> int:
    """Move a file of this host, by name where both are on one file system; returns its size."""
    shutil.move(path, to)
    return to.stat().st_size
