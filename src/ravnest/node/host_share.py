"""Shares the cores and the memory of a PC among its agents, of all runs and coordinators of one user.

Each agent has a file with its claim in a directory of the host, locked while it lives: the system releases the lock of
a process that dies. An owner's limit is kept as it is; agents without one share what is left:

    threads  = (cores - cores of limits) / agents without a limit        the remainder to the oldest; at least 1
    speed    = measured speed of the threads * min(1, cores / threads of all agents)
    memory   = (free memory + memory of the agents' processes - memory of limits) / agents without a limit

The memory that an agent offers is also at most what is free, besides that of its own processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import psutil

from ravnest.core.host import is_locked, lock_file

__all__ = ["Claim", "HostShares", "Share", "processes_bytes", "share_of"]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """An agent of this PC: its process, and its owner's limits."""

    pid: int
    threads: int | None = None
    memory_bytes: int | None = None
    device: str = ""  # the accelerator that it computes on


@dataclass(frozen=True)
class Share:
    """The part of a PC that one agent offers; `speed_factor` is its speed relative to its threads running alone."""

    threads: int
    memory_bytes: int
    speed_factor: float = 1.0
    num_agents: int = 1


def share_of(
    claims: Sequence[Claim], index: int, *, cores: float, free_bytes: int, agents_bytes: Sequence[int]
) -> Share:
    """Return the share of one claim; `claims` are of all agents, the oldest first, `agents_bytes` their memory now."""
    threads = _threads(claims, cores)
    num_unlimited = sum(claim.memory_bytes is None for claim in claims)
    limits_bytes = sum(claim.memory_bytes or 0 for claim in claims)
    pool_bytes = free_bytes + sum(agents_bytes)
    limit_bytes = claims[index].memory_bytes
    if limit_bytes is None:
        limit_bytes = max(0, pool_bytes - limits_bytes) // num_unlimited
    return Share(
        threads=threads[index],
        memory_bytes=min(limit_bytes, free_bytes + agents_bytes[index]),
        speed_factor=min(1.0, max(1.0, cores) / sum(threads)),
        num_agents=len(claims),
    )


def _threads(claims: Sequence[Claim], cores: float) -> list[int]:
    left = max(0, int(cores) - sum(claim.threads or 0 for claim in claims))
    free = [i for i, claim in enumerate(claims) if claim.threads is None]
    each, more = divmod(left, len(free)) if free else (0, 0)
    return [claim.threads or max(1, each + (i in free[:more])) for i, claim in enumerate(claims)]


class HostShares:
    """The claims of this host in `directory`; None where there is no such directory: the agent is alone."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._own: Path | None = None
        self._file: IO[bytes] | None = None

    @contextlib.contextmanager
    def claimed(self, claim: Claim) -> Iterator[None]:
        """Claim a share of this PC."""
        self._claim = claim
        if self._directory is None:
            yield
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{time.time_ns():020d}-{claim.pid}-{id(self):x}"
        draft, path = self._directory / f".{name}", self._directory / name
        with draft.open("wb") as file:
            lock_file(file.fileno())
            self._file = file
            self._write(claim)
            draft.rename(path)  # from now on others see it, locked
            self._own = path
            try:
                yield
            finally:
                self._own = self._file = None
                path.unlink(missing_ok=True)

    def name_device(self, device: str) -> None:
        """Add the accelerator of this agent to its claim."""
        self._claim = msgspec.structs.replace(self._claim, device=device)
        if self._file is not None:
            self._write(self._claim)

    def _write(self, claim: Claim) -> None:
        assert self._file is not None, "the claim has a file"
        content = msgspec.json.encode(claim)
        self._file.seek(0)
        self._file.write(content)
        self._file.truncate(len(content))
        self._file.flush()

    def claims(self) -> tuple[tuple[Claim, ...], int]:
        """Return the claims of all living agents, the oldest first, and the index of this one."""
        if self._directory is None or self._own is None:
            return (self._claim,), 0
        found = {self._own: self._claim}
        for path in self._directory.glob("[0-9]*"):
            if path != self._own and (other := _living(path)) is not None:
                found[path] = other
        names = sorted(found)
        return tuple(found[name] for name in names), names.index(self._own)


def _living(path: Path) -> Claim | None:
    """Return the claim of a living agent; the file of a dead one is removed."""
    with contextlib.suppress(OSError, ValueError):
        with path.open("rb") as file:
            if is_locked(file.fileno()):
                return msgspec.json.decode(file.read(4096), type=Claim)
        path.unlink()
    return None


def processes_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; 0 if it has ended."""
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total
