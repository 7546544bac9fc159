"""Transfer files between a node and its coordinator, in chunks.

A fetched file must have the announced length, which is bounded before it is requested, and the announced digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from pathlib import Path
from typing import IO

from ravnest.errors import LinkError, ProgramError
from ravnest.graph.limits import StageLimits
from ravnest.node.client import Client, LocalClient
from ravnest.protocol.commands import StateSaved
from ravnest.protocol.control import FILE_HEADER, Assignment, Blob
from ravnest.protocol.worker import AssignStage

__all__ = ["fetch", "fetch_stage", "upload_saved"]

_MAX_CONFIG_BYTES = 4 * 2**20
_STATE_FACTOR = 2  # a whole state on disk may be larger than the part of it in memory
_CHUNK_BYTES = 2**18
_DIGEST = re.compile(r"[0-9a-f]{64}")


async def fetch_stage(
    client: Client, assignment: Assignment, directory: Path, *, max_weights_bytes: int
) -> AssignStage:
    """Fetch all files of an assignment; return the message that assigns it to the worker."""
    file, config, weights = directory / "stage", directory / "config", directory / "weights"
    await fetch(client, assignment.file, file, max_bytes=StageLimits().text_bytes)
    await fetch(client, assignment.brief, config, max_bytes=_MAX_CONFIG_BYTES)
    if assignment.weights is not None:
        await fetch(client, assignment.weights, weights, max_bytes=max_weights_bytes)
    states = tuple(directory / f"state-{i}" for i in range(len(assignment.states)))
    for blob, path in zip(assignment.states, states, strict=True):
        await fetch(client, blob, path, max_bytes=_STATE_FACTOR * max_weights_bytes)
    return AssignStage(
        assignment=assignment, coordinator=client.address, file=str(file), config=str(config),
        weights="" if assignment.weights is None else str(weights), states=tuple(map(str, states)),
    )  # fmt: skip


async def fetch(client: Client, blob: Blob, path: Path, *, max_bytes: int) -> None:
    """Fetch a file to `path`; raises `ProgramError` unless it is as announced, `LinkError` if it is incomplete."""
    if not _DIGEST.fullmatch(blob.digest):
        raise ProgramError(f"{blob.digest!r:.80} is not a SHA-256 digest")
    if not 0 <= blob.num_bytes <= max_bytes:
        raise ProgramError(f"a file has at most {max_bytes} bytes, announced are {blob.num_bytes}")
    digest, remaining_bytes = hashlib.sha256(), blob.num_bytes
    try:
        with path.open("wb") as file:
            async with client.request("GET", f"/v1/blobs/{blob.digest}") as response:
                if isinstance(client, LocalClient) and FILE_HEADER in response.headers:
                    file.close()
                    await asyncio.to_thread(_link, Path(response.headers[FILE_HEADER]), path)
                    return  # written and hashed by the same user on this host
                async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                    remaining_bytes -= len(chunk)
                    if remaining_bytes < 0:
                        raise ProgramError(f"the file is longer than the announced {blob.num_bytes} bytes")
                    digest.update(chunk)
                    await asyncio.to_thread(_write, file, chunk)
    except OSError as error:
        raise _disk_error(error) from error
    if remaining_bytes:
        raise LinkError(f"the file ended {remaining_bytes} bytes early")
    if digest.hexdigest() != blob.digest:
        raise ProgramError(f"the digest of the file differs from the announced {blob.digest}")


def _write(file: IO[bytes], chunk: bytes) -> None:
    """Write, so that an error of the disk does not look like one of the connection."""
    try:
        file.write(chunk)
    except OSError as error:
        raise _disk_error(error) from error


def _disk_error(error: OSError) -> ProgramError:
    return ProgramError(f"cannot write the files of the stage: {error.strerror or error}")


def _link(source: Path, path: Path) -> None:
    """Hard-link a file of this host; copy it where that is impossible."""
    path.unlink(missing_ok=True)
    try:
        path.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, path)


async def upload_saved(client: Client, path: Path, generation: int, saved: StateSaved) -> None:
    """Upload the weights of a stage, or its whole state."""
    target = f"weights/{generation}/{saved.stage}"
    if saved.is_state:
        target = f"states/{generation}/{saved.stage}/{saved.updates}"
    if isinstance(client, LocalClient):
        await client.ask("PUT", f"/v1/{target}", headers={FILE_HEADER: str(path)})
        return
    with path.open("rb") as file:
        await client.ask("PUT", f"/v1/{target}", data=file)
