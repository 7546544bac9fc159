"""The pages and their data over HTTP: access, static files, limits.

    /                  the page; it and its files hold no data and need no token
    /assets/NAME       scripts and styles of the package, nothing else
    /v1/stream         the document and its changes, as server-sent events
    /v1/nodes/NAME     the history of one node
    /metrics           the state of the run for Prometheus
    /v1/access         for the requester: the viewers' link, addresses of nodes, rejected connections

A token in the fragment of a link (`#token=...`) never reaches a server's log; the page sends it in a header. There are
no cookies, which servers of other ports of one host would share. All requests are reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from aiohttp import web

from ravnest.coordinator.http.limits import RequestRates
from ravnest.dashboard.prometheus import CONTENT_TYPE
from ravnest.errors import LinkError, RequestRejected

__all__ = [
    "HEADERS",
    "Access",
    "DashboardData",
    "Role",
    "bearer",
    "make_site",
    "static_files",
    "write_secret",
]

Role = Literal["requester", "viewer"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_REQUESTS_PER_S, _BURST = 80.0, 1200.0  # of all networks; a quarter from each. A page takes 15 requests at its start
_REJECTION_S = 2.0  # before a rejection is sent: a client that repeats at once does not keep this process busy
_MAX_REJECTED = 32  # requests that wait for their rejection; further ones are disconnected


class Access(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The port and the tokens of a dashboard, kept for restarts in a file that only this user can read."""

    port: int
    requester: str
    viewer: str

    @classmethod
    def open(cls, path: Path) -> Access:
        """Return the access of an earlier start, or a new one, which `save` keeps."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=cls)
        return cls.new()

    @classmethod
    def new(cls) -> Access:
        return cls(port=0, requester=secrets.token_urlsafe(24), viewer=secrets.token_urlsafe(24))

    def save(self, path: Path) -> None:
        write_secret(path, msgspec.json.encode(self))

    def link(self, role: Role = "requester", page: str = "") -> str:
        """Return the link to the pages, or to one of them, such as `node/attic`."""
        token = self.requester if role == "requester" else self.viewer
        return f"http://127.0.0.1:{self.port}/#token={token}{f'/{urllib.parse.quote(page)}' if page else ''}"

    def role_of(self, token: str) -> Role | None:
        given = token.encode(errors="replace")
        if hmac.compare_digest(given, self.requester.encode()):
            return "requester"
        return "viewer" if hmac.compare_digest(given, self.viewer.encode()) else None


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only this user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


class DashboardData(Protocol):
    """The data behind the pages."""

    async def stream(self, request: web.Request) -> web.StreamResponse: ...

    async def node(self, name: str) -> bytes: ...

    async def access(self) -> bytes: ...

    async def metrics(self) -> bytes: ...

    async def close(self) -> None: ...


@cache
def static_files() -> dict[str, bytes]:
    """The files of the pages by name."""
    folder = resources.files("ravnest.dashboard") / "static"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if Path(entry.name).suffix in _KINDS}


Admit = Callable[[web.Request], Role | None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_site(data: DashboardData, admit: Admit, *, hosts: Callable[[], set[str]] | None = None) -> web.Application:
    """Return the app. `hosts` are the valid values of the Host header, if only some are."""
    site = _Site(data, admit)
    app = web.Application(middlewares=[_limits(hosts)], client_max_size=1024)
    app.router.add_get("/", site.page)
    app.router.add_get("/assets/{name:[a-z_-]{1,40}[.](?:js|css|svg)}", site.asset)
    app.router.add_get("/v1/stream", site.stream)
    app.router.add_get("/v1/nodes/{name:.{1,200}}", site.node)
    app.router.add_get("/v1/access", site.access)
    app.router.add_get("/metrics", site.metrics)
    app.on_shutdown.append(lambda _: data.close())
    return app


def _limits(hosts: Callable[[], set[str]] | None) -> Any:
    """Limit the rate of requests, and refuse pages of other origins and names that lead to this host."""
    rates, rejections = RequestRates(_REQUESTS_PER_S, _BURST, time.monotonic), _Rejections()

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not rates.take(request.remote or ""):
            return await rejections.reject(request)
        if hosts is not None and request.headers.get("Host", "") not in hosts():
            return _error("this address is not served here: open the link that `ravnest dashboard` prints", 421)
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return _error("requests of other pages are refused", 403)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _error("no such page", error.status)
        except RequestRejected as error:  # by the coordinator to which a request was forwarded
            return _error(str(error), error.status)
        except LinkError as error:
            return _error(str(error), 502)

    return answer


class _Rejections:
    """Rejections of requests beyond the rate: each is sent after a while."""

    def __init__(self) -> None:
        self._num_waiting = 0

    async def reject(self, request: web.Request) -> web.Response:
        """Return a rejection after a while, or disconnect at once if many wait for theirs."""
        if self._num_waiting >= _MAX_REJECTED and request.transport is not None:
            request.transport.abort()
        else:
            self._num_waiting += 1
            try:
                await asyncio.sleep(_REJECTION_S)
            finally:
                self._num_waiting -= 1
        return _error("too many requests: try again in a few seconds", 429, {"Retry-After": "5"})


class _Site:
    def __init__(self, data: DashboardData, admit: Admit) -> None:
        self._data, self._admit = data, admit

    async def page(self, request: web.Request) -> web.StreamResponse:
        return _file("index.html")

    async def asset(self, request: web.Request) -> web.StreamResponse:
        return _file(request.match_info["name"])

    async def stream(self, request: web.Request) -> web.StreamResponse:
        return self._refusal(request) or await self._data.stream(request)

    async def node(self, request: web.Request) -> web.StreamResponse:
        return self._refusal(request) or _json(await self._data.node(request.match_info["name"]))

    async def access(self, request: web.Request) -> web.StreamResponse:
        return self._refusal(request, for_requester=True) or _json(await self._data.access())

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        refusal = self._refusal(request)
        headers = {**HEADERS, "Content-Type": CONTENT_TYPE}
        return refusal or web.Response(body=await self._data.metrics(), headers=headers)

    def _refusal(self, request: web.Request, *, for_requester: bool = False) -> web.Response | None:
        role = self._admit(request)
        if role is None:
            return _error("a valid link is needed: run `ravnest dashboard` for one", 401)
        if for_requester and role != "requester":
            return _error("this page is for the requester of the run: a viewer's link does not open it", 403)
        return None


def bearer(request: web.Request) -> str:
    """Return the token of a request, or an empty text."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme == "Bearer" else ""


def _file(name: str) -> web.Response:
    body = static_files().get(name)
    if body is None:
        return _error("no such file", 404)
    return web.Response(body=body, content_type=_KINDS[Path(name).suffix], charset="utf-8", headers=HEADERS)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json", headers=HEADERS)


def _error(reason: str, status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        text=json.dumps({"error": reason}), status=status, content_type="application/json",
        headers={**HEADERS, **(headers or {})},
    )  # fmt: skip
