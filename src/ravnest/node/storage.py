"""Files of a node that outlive the agent: identity, port, log, files of its stage, and replicas.

.../ravnest/nodes/FINGERPRINT-NAME/
    lock           held by the running agent
    key.pem certificate.pem authority.pem
    port           the endpoint's last port
    worker.log     since the agent's last start
    stages/7/      files of the stage of generation 7; removed with the stage
    replicas/      replica store, of the run that is named in `run`
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ravnest.core.host import data_directory, lock_directory
from ravnest.worker.replica_store import ReplicaStore

__all__ = ["NodeStorage", "host_directory", "host_sockets", "node_directory"]

_FINGERPRINT_LETTERS = 8


def node_directory(nodes: Path | None, fingerprint: str, name: str) -> Path:
    """Return the directory of a member of a fleet; `nodes` defaults to the user's data directory."""
    return (nodes or data_directory() / "nodes") / f"{fingerprint[:_FINGERPRINT_LETTERS]}-{name}"


def host_directory() -> Path | None:
    """Return the directory that the agents of this user on this host share; None where it cannot be used.

    Each network namespace is a host of its own: a container or a testbed host is reached over its network.
    """
    if not hasattr(os, "getuid"):
        return None
    private = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"ravnest-{os.getuid()}"
    try:
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = private.stat()
        if info.st_uid != os.getuid() or info.st_mode & 0o077:
            return None
        base = private / _network_namespace()
        base.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return base


def host_sockets(fingerprint: str) -> tuple[Path | None, str]:
    """Return the directory where nodes of this user and run listen on this host, and a name for the host.

    The name is random and kept in the directory's parent, so two nodes have the same only if they share the directory.
    None where the system has no unix sockets or the directory cannot be used.
    """
    base = host_directory()
    if base is None or not hasattr(socket, "AF_UNIX"):
        return None, ""
    try:
        with contextlib.suppress(FileExistsError):
            draft = base / f".host-{secrets.token_hex(8)}"
            draft.write_text(secrets.token_hex(16))
            try:
                (base / "host").hardlink_to(draft)
            finally:
                draft.unlink()
        return base / fingerprint[:_FINGERPRINT_LETTERS], (base / "host").read_text()
    except OSError:
        return None, ""


def _network_namespace() -> str:
    """A name of the network namespace of this process; the same for all where the system has none."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/net").stat().st_ino)
    return "host"


class NodeStorage:
    """The directory of one node in one run."""

    def __init__(self, directory: Path, *, log: Path | None = None) -> None:
        self.directory = directory
        self.log = log or self.directory / "worker.log"
        self._stages = self.directory / "stages"
        self._port = self.directory / "port"
        self._run = self.directory / "run"
        self.replica_store = ReplicaStore(self.directory / "replicas")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the directory; remove files of stages before and after, and replicas after an orderly end."""
        busy = f"another agent uses {self.directory}: end it, or give this one another --name"
        with lock_directory(self.directory, busy):
            self._clear()
            self.log.write_bytes(b"")
            try:
                yield
            finally:
                self._clear()
                self.replica_store.clear()  # an orderly end leaves no files

    @property
    def port(self) -> int:
        """The endpoint's last port; 0 if unknown."""
        with contextlib.suppress(OSError, ValueError):
            port = int(self._port.read_text())
            return port if 0 < port < 2**16 else 0
        return 0

    @port.setter
    def port(self, port: int) -> None:
        with contextlib.suppress(OSError):  # the next start chooses another one
            self._port.write_text(f"{port}\n")

    def set_run(self, run: str) -> None:
        """Remember the run, and remove replicas of another one."""
        with contextlib.suppress(OSError):
            if not self._run.exists() or self._run.read_text() != run:
                self.replica_store.clear()
                self._run.write_text(run)

    def stage_files(self, generation: int) -> Path:
        directory = self._stages / str(generation)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def remove_stage_files(self, generation: int) -> None:
        shutil.rmtree(self._stages / str(generation), ignore_errors=True)

    def _clear(self) -> None:
        shutil.rmtree(self._stages, ignore_errors=True)
