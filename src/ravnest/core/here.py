"""This machine as the system has it: what it is called, where a user's data are kept, and files that one process holds.

All that differs between systems and is needed by several of our packages is here.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from .errors import RavnestError

__all__ = ["data_directory", "hold", "host_name"]


def data_directory() -> Path:
    """Where Ravnest keeps what belongs to this user, as this system has it."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "ravnest"


def host_name() -> str:
    """What the machine is called, as far as a node may be called so."""
    host = socket.gethostname().split(".")[0].lower()
    return re.sub(r"[^a-z0-9_-]", "-", host).lstrip("-_")[:63] or "node"


@contextlib.contextmanager
def hold(directory: Path, otherwise: str) -> Iterator[None]:
    """The directory, made if it is not there, is ours alone; else a `RavnestError` that says `otherwise`."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (directory / "lock").open("a")
    except OSError as error:
        raise RavnestError(f"cannot keep anything in {directory}: {error}") from error
    with file:
        try:
            _lock(file.fileno())
        except OSError:
            raise RavnestError(otherwise) from None
        yield


def _lock(fd: int) -> None:
    """Until the file is closed or the process is gone; `OSError` if somebody has it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
