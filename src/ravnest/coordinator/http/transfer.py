"""Streams HTTP bodies in chunks, with a timeout per chunk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from io import SEEK_END
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from aiohttp import web

from ravnest.core.config import require

__all__ = ["CHUNK_BYTES", "read_json", "receive_file", "send_file", "sending"]

T = TypeVar("T")

CHUNK_BYTES = 64 * 1024


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
