"""The copies that a PC keeps: what stages had learnt, one file each, the newest of every stage.

    copies/c7-2-140.safetensors        stage 2 of cluster c7 after 140 updates

A copy comes from this PC's own part when that ends, or from another node that this one keeps a copy for. Files outlive
the agent, so a PC that comes back still has what it had. They are complete or not there: a file gets its name when all
of it is written. At most `MOST_COPIES` are kept, the oldest go.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..core.control import MOST_COPIES, Copy

__all__ = ["Shelf"]

_NAME = re.compile(r"([a-z0-9][a-z0-9_-]{0,62})-(\d{1,6})-(\d{1,12})\.safetensors")
_SUFFIX = ".safetensors"
_DRAFT = ".copy-draft-"


class Shelf:
    """One directory; the worker writes it, its agent reads it too."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def copies(self) -> tuple[Copy, ...]:
        """All that are here, the oldest file first."""
        return tuple(copy for _, copy in sorted(self._found(), key=lambda found: found[0]))

    def find(self, cluster: str, stage: int) -> Copy | None:
        """The newest of a stage."""
        mine = [copy for copy in self.copies() if (copy.cluster, copy.stage) == (cluster, stage)]
        return max(mine, key=lambda copy: copy.updates, default=None)

    def path(self, copy: Copy) -> Path:
        return self.directory / f"{copy.cluster}-{copy.stage}-{copy.updates}{_SUFFIX}"

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """A file to write to, gone afterwards unless `put` has taken it. Raises `OSError`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{_DRAFT}{os.getpid()}-{os.urandom(4).hex()}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def put(self, path: Path, copy: Copy) -> None:
        """Keep a file that is complete as the newest copy of its stage."""
        path.replace(self.path(copy))
        os.utime(self.path(copy))
        for older in self.copies():
            if (older.cluster, older.stage) == (copy.cluster, copy.stage) and older != copy:
                self.drop(older)
        for older in self.copies()[:-MOST_COPIES]:
            self.drop(older)

    def drop(self, copy: Copy) -> None:
        with contextlib.suppress(OSError):
            self.path(copy).unlink()

    def clear(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def clear_drafts(self) -> None:
        """What a worker that was killed has left half written."""
        for path in self.directory.glob(f"{_DRAFT}*"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _found(self) -> Iterator[tuple[float, Copy]]:
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.directory):
                match = _NAME.fullmatch(entry.name)
                if match is not None:
                    yield entry.stat().st_mtime, Copy(match[1], int(match[2]), int(match[3]))
