"""Bodies of requests and answers, in pieces and with patience: a guest who stalls costs one piece, and not for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from io import SEEK_END
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from aiohttp import web

from ..core.config import require

__all__ = ["PIECE_BYTES", "read_json", "receive_file", "send_file", "sending"]

T = TypeVar("T")

PIECE_BYTES = 64 * 1024


async def read_json(request: web.Request, kind: type[T], *, within_s: float) -> T:
    """A short body, whole; raises `ValueError` for what is no such thing."""
    async with asyncio.timeout(within_s):
        return msgspec.json.decode(await request.read(), type=kind)


async def receive_file(request: web.Request, path: Path, *, most_bytes: int, within_s: float) -> int:
    """Write a body to a file and count its bytes. It may take long as a whole, but not in any part."""
    num_bytes = 0
    with path.open("wb") as file:
        while True:
            async with asyncio.timeout(within_s):
                piece = await request.content.readany()
            if not piece:
                return num_bytes
            num_bytes += len(piece)
            require(num_bytes <= most_bytes, f"more than the {most_bytes} bytes that belong to this stage")
            file.write(piece)


async def send_file(request: web.Request, file: BinaryIO, *, within_s: float) -> web.StreamResponse:
    """Answer with a file, in which each piece has its time."""
    response = web.StreamResponse()
    response.content_length = file.seek(0, SEEK_END)
    file.seek(0)
    await response.prepare(request)
    while piece := file.read(PIECE_BYTES):
        async with sending(request, within_s=within_s):
            await response.write(piece)
    await response.write_eof()
    return response


@contextlib.asynccontextmanager
async def sending(request: web.Request, *, within_s: float) -> AsyncIterator[None]:
    """Whoever does not take what is sent inside this is cut off: nothing else could be said to them either."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise
