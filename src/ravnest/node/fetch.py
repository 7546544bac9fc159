"""Files between a node and its coordinator: fetched into the node's own directory, checked while they come.

A file is taken only at the length that was announced, which is bounded before a byte is asked for, and with the digest
that it is named by. Files go either way a piece at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import IO

from ..core.control import Blob, Part
from ..core.errors import LinkError, ProgramError
from ..core.orders import Saved
from ..graph.limits import Limits
from .client import Client
from .talk import Take

__all__ = ["fetch", "fetch_part", "send_saved"]

_MAX_BRIEF_BYTES = 4 * 2**20
_STATE_FACTOR = 2  # a whole state on disk may be larger than what of it is in memory
_PIECE_BYTES = 2**18
_DIGEST = re.compile(r"[0-9a-f]{64}")


async def fetch_part(client: Client, part: Part, directory: Path, *, max_weights_bytes: int) -> Take:
    """All files of a part, and the order to be it."""
    file, brief, weights = directory / "stage", directory / "brief", directory / "weights"
    await fetch(client, part.file, file, max_bytes=Limits().text_bytes)
    await fetch(client, part.brief, brief, max_bytes=_MAX_BRIEF_BYTES)
    if part.weights is not None:
        await fetch(client, part.weights, weights, max_bytes=max_weights_bytes)
    states = tuple(directory / f"state-{i}" for i in range(len(part.states)))
    for blob, path in zip(part.states, states, strict=True):
        await fetch(client, blob, path, max_bytes=_STATE_FACTOR * max_weights_bytes)
    return Take(
        part=part, coordinator=client.address, file=str(file), brief=str(brief),
        weights="" if part.weights is None else str(weights), states=tuple(map(str, states)),
    )  # fmt: skip


async def fetch(client: Client, blob: Blob, path: Path, *, max_bytes: int) -> None:
    """Whole and as announced, or not at all."""
    if not _DIGEST.fullmatch(blob.digest):
        raise ProgramError(f"{blob.digest!r:.80} is not the digest of a file")
    if not 0 <= blob.num_bytes <= max_bytes:
        raise ProgramError(f"a file of {blob.num_bytes} bytes was announced, at most {max_bytes} are taken")
    digest, left_bytes = hashlib.sha256(), blob.num_bytes
    try:
        with path.open("wb") as file:
            async with client.request("GET", f"/v1/blobs/{blob.digest}") as response:
                async for piece in response.content.iter_chunked(_PIECE_BYTES):
                    left_bytes -= len(piece)
                    if left_bytes < 0:
                        raise ProgramError(f"a file is longer than the {blob.num_bytes} bytes announced")
                    digest.update(piece)
                    await asyncio.to_thread(_write, file, piece)
    except OSError as error:
        raise _unkept(error) from error
    if left_bytes:
        raise LinkError(f"a file ended {left_bytes} bytes early")
    if digest.hexdigest() != blob.digest:
        raise ProgramError("a file is not what was announced: its digest differs")


def _write(file: IO[bytes], piece: bytes) -> None:
    """An error of the disk must not look like one of the line."""
    try:
        file.write(piece)
    except OSError as error:
        raise _unkept(error) from error


def _unkept(error: OSError) -> ProgramError:
    return ProgramError(f"this PC cannot keep the files of its part: {error.strerror or error}")


async def send_saved(client: Client, path: Path, generation: int, saved: Saved) -> None:
    """A stage's weights, or all that it had learnt."""
    where = f"weights/{generation}/{saved.stage}"
    if saved.is_state:
        where = f"states/{generation}/{saved.stage}/{saved.updates}"
    with path.open("rb") as file:
        await client.ask("PUT", f"/v1/{where}", data=file)
