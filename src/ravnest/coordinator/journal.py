"""Events on disk, so that a coordinator that was stopped knows again what it knew.

Events are added at the end of the file. When it has grown, `compact` replaces it by one snapshot of the state; that
happens by renaming, so there is always one good file.

While the disk refuses, events wait in memory, up to a bound, and training goes on. Beyond the bound they are dropped,
and a snapshot stands for them as soon as the disk takes one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ..core.config import config, format_bytes, require
from ..core.disk import sync_directory
from ..core.errors import RavnestError
from .events import Event
from .journalfile import Snapshot, encode_record, open_private, replay, write_all, write_new
from .state import State, snapshot

__all__ = ["Journal", "JournalConfig", "replay"]


@config
class JournalConfig:
    """How much may wait for a disk that refuses, and how much is written before a snapshot replaces it."""

    max_waiting_bytes: int = 8 * 1024 * 1024
    compact_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        require(self.max_waiting_bytes > 0, "max_waiting_bytes must be at least 1")
        require(self.compact_bytes > 0, "compact_bytes must be at least 1")


def _ignore(text: str) -> None:
    """Nobody asked to hear of trouble."""


class Journal:
    """An open journal, with one owner. `on_trouble` hears once that the disk refuses, and once that it is well again.

    `compact(state)` also tells it whose events these are; it needs that to make snapshots of its own accord.
    """

    def __init__(
        self, path: Path, *, on_trouble: Callable[[str], None] = _ignore, config: JournalConfig | None = None
    ) -> None:
        self.path, self.config, self._on_trouble = path, config or JournalConfig(), on_trouble
        self._state: State | None = None
        self._waiting = bytearray()
        self._has_dropped = False
        self._is_torn = False
        self._is_in_trouble = False
        self._file: int | None = None
        try:
            self._good_bytes = os.fstat(self._opened()).st_size
        except OSError as error:
            raise RavnestError(f"the journal {path} cannot be opened: {error.strerror}") from error
        self._compacted_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """What is not on disk yet."""
        return len(self._waiting)

    @property
    def has_dropped(self) -> bool:
        """Whether events are missing that only a snapshot can make good."""
        return self._has_dropped

    def append(self, event: Event) -> None:
        """Keep an event, after the state has seen it; it is on disk after the next `flush` that succeeds."""
        if self._has_dropped:
            return
        self._waiting += encode_record(event)
        if len(self._waiting) > self.config.max_waiting_bytes:
            self.flush()
        if len(self._waiting) > self.config.max_waiting_bytes:
            self._waiting.clear()
            self._has_dropped = True

    def flush(self, *, sync: bool = False) -> bool:
        """Write what waits; with `sync`, to the platter. Whether all is written: if not, a later flush tries again."""
        try:
            if self._has_dropped:
                if self._state is None:
                    return False
                self._replace(self._state)
            else:
                self._write(sync=sync)
        except OSError as error:
            self._refused(error)
            return False
        self._well_again()
        if self._state is not None and self._good_bytes - self._compacted_bytes > self.config.compact_bytes:
            self.compact(self._state)
            self._compacted_bytes = self._good_bytes  # if it failed, try again when as much has come once more
        return not self._waiting

    def compact(self, state: State) -> bool:
        """Replace the file by one snapshot of this state, which has seen every event that was appended."""
        self._state = state
        try:
            self._replace(state)
        except OSError as error:
            self._refused(error)
            return False
        self._well_again()
        return True

    def close(self) -> None:
        """Write what waits and let go of the file."""
        self.flush()
        self._let_go()

    def _write(self, *, sync: bool) -> None:
        if self._is_torn:
            os.ftruncate(self._opened(), self._good_bytes)
        self._is_torn = bool(self._waiting)  # until all is there
        write_all(self._opened(), self._waiting)
        self._good_bytes += len(self._waiting)
        self._waiting.clear()
        self._is_torn = False
        if sync:
            os.fsync(self._opened())

    def _replace(self, state: State) -> None:
        """Write a new file beside the old, then put it in its place; some systems want both closed for that."""
        beside = self.path.with_name(self.path.name + ".new")
        data = encode_record(Snapshot(snapshot(state)))
        try:
            write_new(beside, data)
            self._let_go()
            os.replace(beside, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        self._good_bytes = self._compacted_bytes = len(data)
        self._waiting.clear()
        self._has_dropped = self._is_torn = False
        sync_directory(self.path.parent)

    def _opened(self) -> int:
        if self._file is None:
            self._file = open_private(self.path)
        return self._file

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _refused(self, error: OSError) -> None:
        if not self._is_in_trouble:
            self._is_in_trouble = True
            most = format_bytes(self.config.max_waiting_bytes)
            self._on_trouble(
                f"the journal {self.path.name} cannot be written: {error.strerror}; training goes on, and up to "
                f"{most} of events wait in memory"
            )

    def _well_again(self) -> None:
        if self._is_in_trouble:
            self._is_in_trouble = False
            self._on_trouble(f"the journal {self.path.name} is written again, and complete")
