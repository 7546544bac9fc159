"""Where a node keeps what is its own, between one start and the next: identity, port, log, and files of its part.

.../ravnest/nodes/FINGERPRINT-NAME/
    lock         held by the agent that runs
    key.pem certificate.pem authority.pem
    port         where its door was last
    worker.log   since the agent's last start
    parts/7/     stage, brief and weights of generation 7; gone when the part is
    copies/      what stages had learnt (`shelf`), of the run that is named in `run`
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..core.here import data_directory, hold
from .shelf import Shelf

__all__ = ["Home", "default_directory"]

_FINGERPRINT_LETTERS = 8


def default_directory() -> Path:
    """Where nodes are kept."""
    return data_directory() / "nodes"


class Home:
    """The directory of one node in one run."""

    def __init__(self, nodes: Path, fingerprint: str, name: str) -> None:
        self.directory = nodes / f"{fingerprint[:_FINGERPRINT_LETTERS]}-{name}"
        self.log = self.directory / "worker.log"
        self._parts = self.directory / "parts"
        self._port = self.directory / "port"
        self._run = self.directory / "run"
        self.shelf = Shelf(self.directory / "copies")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Ours alone; nothing of an earlier part is left in it, before and after. Copies outlive only a crash."""
        busy = f"another agent works in {self.directory}: end it, or give this one another --name"
        with hold(self.directory, busy):
            self._clear()
            self.log.write_bytes(b"")
            try:
                yield
            finally:
                self._clear()
                self.shelf.clear()  # who leaves in good order leaves nothing behind

    @property
    def port(self) -> int:
        """Where the door was last; 0 if that is not known."""
        with contextlib.suppress(OSError, ValueError):
            port = int(self._port.read_text())
            return port if 0 < port < 2**16 else 0
        return 0

    @port.setter
    def port(self, port: int) -> None:
        with contextlib.suppress(OSError):  # the next start chooses another one
            self._port.write_text(f"{port}\n")

    def belong(self, run: str) -> None:
        """Copies of another run are of no use in this one."""
        with contextlib.suppress(OSError):
            if not self._run.exists() or self._run.read_text() != run:
                self.shelf.clear()
                self._run.write_text(run)

    def part(self, generation: int) -> Path:
        directory = self._parts / str(generation)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def forget_part(self, generation: int) -> None:
        shutil.rmtree(self._parts / str(generation), ignore_errors=True)

    def _clear(self) -> None:
        shutil.rmtree(self._parts, ignore_errors=True)
