"""Access to the operating system: data directory, host name, directory locks, durable renames.

Platform differences that several packages need are handled here.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ravnest.errors import RavnestError

__all__ = ["data_directory", "host_name", "is_locked", "lock_directory", "lock_file", "sync_directory"]


def data_directory() -> Path:
    """The user's data directory for Ravnest, by the platform's convention."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "ravnest"


def host_name() -> str:
    """The machine's host name, reduced to a valid node name."""
    host = socket.gethostname().split(".")[0].lower()
    return re.sub(r"[^a-z0-9_-]", "-", host).lstrip("-_")[:63] or "node"


@contextlib.contextmanager
def lock_directory(directory: Path, locked_message: str) -> Iterator[None]:
    """Lock `directory` for this process, creating it if needed.

    Raises:
        RavnestError: with `locked_message` if another process holds the lock.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (directory / "lock").open("a")
    except OSError as error:
        raise RavnestError(f"cannot write to {directory}: {error}") from error
    with file:
        try:
            lock_file(file.fileno())
        except OSError:
            raise RavnestError(locked_message) from None
        yield


def lock_file(fd: int) -> None:
    """Lock until the file is closed or the process ends; `OSError` if another process holds the lock."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(fd: int) -> bool:
    """Whether the lock of this file is held through another open file; several may look at a time."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk where the system can: a crash may otherwise undo a rename."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
