"""Stores events on disk, so that a restarted coordinator restores its state.

    journal    record, record, ...         each appended once
    record     length u32 | crc32 u32 | length bytes of MessagePack: an event, or a snapshot of the whole state

Integers are in network byte order. A journal starts with a snapshot, which names the format version; when the file has
grown, `compact` replaces it by a new snapshot with an atomic rename. A write that was cut short, by a crash or a full
disk, damages no record before it: the reader uses the complete records and truncates the rest.

While the disk cannot be written, events wait in memory, up to a limit, and training continues. Beyond the limit they
are dropped, and a snapshot replaces them as soon as the disk can be written again.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from zlib import crc32

import msgspec

from ravnest.coordinator.apply import apply, restore, snapshot
from ravnest.coordinator.events import Event
from ravnest.coordinator.state import CoordinatorState
from ravnest.core.config import config, require
from ravnest.core.host import sync_directory
from ravnest.core.units import format_bytes
from ravnest.errors import RavnestError

__all__ = ["Journal", "JournalConfig", "Snapshot", "replay"]

_FORMAT_VERSION = 2
_HEAD = struct.Struct("!II")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class Snapshot(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A whole state (`apply.snapshot`), which replaces all records before it."""

    state: bytes
    version: int = 1  # format 1 did not have this field


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event | Snapshot)


def replay(path: Path) -> tuple[CoordinatorState, list[str]]:
    """The state in a journal, and descriptions of problems with the file. A missing file is an empty one.

    Unreadable records at the end are moved to a file beside it, so that events can be appended.

    Raises:
        RavnestError: The journal has another format version.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return CoordinatorState(), []
    except OSError as error:
        return CoordinatorState(), [f"cannot read the journal {path.name}: {error.strerror}"]
    state, good_bytes, problem = _apply_all(data, path)
    if problem is None:
        return state, []
    if good_bytes < len(data):
        state, _, _ = _apply_all(data[:good_bytes], path)  # the failed event may have been applied in part
    return state, [problem, *_quarantine_tail(path, data, good_bytes)]


def _apply_all(data: bytes, path: Path) -> tuple[CoordinatorState, int, str | None]:
    """The state after all good records, their size, and the problem of the next record."""
    state, start = CoordinatorState(), 0
    while start < len(data):
        position = f"the journal record at byte {start} of {len(data)}"
        if len(data) - start < _HEAD.size:
            return state, start, f"{position} is incomplete"
        length, checksum = _HEAD.unpack_from(data, start)
        payload = data[start + _HEAD.size : start + _HEAD.size + length]
        if len(payload) < length:
            return state, start, f"{position} is incomplete"
        if crc32(payload) != checksum:
            return state, start, f"{position} is damaged"
        try:
            record = _decoder.decode(payload)
            if isinstance(record, Snapshot):
                _check_version(record, path)
                state = restore(record.state)
            else:
                apply(state, record)
        except (msgspec.MsgspecError, AssertionError, KeyError) as error:
            return state, start, f"{position} cannot be applied: {error}"
        start += _HEAD.size + length
    return state, start, None


def _check_version(snapshot: Snapshot, path: Path) -> None:
    if snapshot.version != _FORMAT_VERSION:
        raise RavnestError(
            f"the journal {path} has format {snapshot.version}, this release reads format {_FORMAT_VERSION}: continue "
            "with the release that wrote it, or start with another coordinator directory"
        )


def _quarantine_tail(path: Path, data: bytes, good_bytes: int) -> list[str]:
    beside = path.with_name(path.name + ".cut")
    rest, problems = len(data) - good_bytes, list[str]()
    try:
        _write_new(beside, data[good_bytes:])
        problems.append(f"moved its last {format_bytes(rest)} to {beside.name}")
    except OSError as error:
        problems.append(f"cannot save its last {format_bytes(rest)}: {error.strerror}")
    try:
        os.truncate(path, good_bytes)
    except OSError as error:
        problems.append(f"cannot truncate the journal {path.name}: {error.strerror}")
    return problems


def _encode_record(record: Event | Snapshot) -> bytes:
    payload = _encoder.encode(record)
    return _HEAD.pack(len(payload), crc32(payload)) + payload


def _open_private(path: Path, flags: int = 0) -> int:
    """Open for appending; the file is readable by this user only, even if it existed before."""
    file = os.open(path, _FLAGS | flags, 0o600)
    if hasattr(os, "fchmod") and S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, 0o600)
    return file


def _write_all(file: int, data: bytes | bytearray) -> None:
    rest = memoryview(bytes(data))
    while rest:
        rest = rest[os.write(file, rest) :]


def _write_new(path: Path, data: bytes) -> None:
    """Write a whole file and sync it to disk."""
    file = _open_private(path, os.O_TRUNC)
    try:
        _write_all(file, data)
        os.fsync(file)
    finally:
        os.close(file)


@config
class JournalConfig:
    """Limits for bytes that wait while the disk cannot be written, and for the file before it is compacted."""

    max_waiting_bytes: int = 8 * 1024 * 1024
    compact_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        require(self.max_waiting_bytes > 0, f"max_waiting_bytes must be > 0, got {self.max_waiting_bytes}")
        require(self.compact_bytes > 0, f"compact_bytes must be > 0, got {self.compact_bytes}")


def _ignore(text: str) -> None:
    """The default of `on_trouble`."""


class Journal:
    """An open journal with one owner. `on_trouble` is called when writing starts to fail, and when it works again.

    `compact(state)` also sets the state of which the journal takes snapshots by itself later.
    """

    def __init__(
        self, path: Path, *, on_trouble: Callable[[str], None] = _ignore, config: JournalConfig | None = None
    ) -> None:
        self.path, self.config, self._on_trouble = path, config or JournalConfig(), on_trouble
        self._state: CoordinatorState | None = None
        self._waiting = bytearray()
        self._has_dropped = False
        self._is_torn = False
        self._is_failing = False
        self._file: int | None = None
        try:
            self._good_bytes = os.fstat(self._open_file()).st_size
        except OSError as error:
            raise RavnestError(f"cannot open the journal {path}: {error.strerror}") from error
        self._compacted_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are not on disk yet."""
        return len(self._waiting)

    @property
    def has_dropped(self) -> bool:
        """Whether events are missing from the file until the next snapshot."""
        return self._has_dropped

    def append(self, event: Event) -> None:
        """Add an event that the state has seen; it is on disk after the next successful `flush`."""
        if self._has_dropped:
            return
        self._waiting += _encode_record(event)
        if len(self._waiting) > self.config.max_waiting_bytes:
            self.flush()
        if len(self._waiting) > self.config.max_waiting_bytes:
            self._waiting.clear()
            self._has_dropped = True

    def flush(self, *, sync: bool = False) -> bool:
        """Write waiting events; with `sync`, sync them to disk. Returns whether all are written."""
        try:
            if self._has_dropped:
                if self._state is None:
                    return False
                self._replace(self._state)
            else:
                self._write(sync=sync)
        except OSError as error:
            self._write_failed(error)
            return False
        self._write_succeeded()
        if self._state is not None and self._good_bytes - self._compacted_bytes > self.config.compact_bytes:
            self.compact(self._state)
            self._compacted_bytes = self._good_bytes  # if it failed, the next attempt is after as many bytes
        return not self._waiting

    def compact(self, state: CoordinatorState) -> bool:
        """Replace the file by a snapshot of this state, which has seen every appended event."""
        self._state = state
        try:
            self._replace(state)
        except OSError as error:
            self._write_failed(error)
            return False
        self._write_succeeded()
        return True

    def close(self) -> None:
        """Write waiting events and close the file."""
        self.flush()
        self._close_file()

    def _write(self, *, sync: bool) -> None:
        if self._is_torn:
            os.ftruncate(self._open_file(), self._good_bytes)
        self._is_torn = bool(self._waiting)  # until all bytes are written
        _write_all(self._open_file(), self._waiting)
        self._good_bytes += len(self._waiting)
        self._waiting.clear()
        self._is_torn = False
        if sync:
            os.fsync(self._open_file())

    def _replace(self, state: CoordinatorState) -> None:
        """Write a new file and rename it over the old one; some systems require both to be closed."""
        beside = self.path.with_name(self.path.name + ".new")
        data = _encode_record(Snapshot(snapshot(state), _FORMAT_VERSION))
        try:
            _write_new(beside, data)
            self._close_file()
            os.replace(beside, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        self._good_bytes = self._compacted_bytes = len(data)
        self._waiting.clear()
        self._has_dropped = self._is_torn = False
        sync_directory(self.path.parent)

    def _open_file(self) -> int:
        if self._file is None:
            self._file = _open_private(self.path)
        return self._file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _write_failed(self, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            limit = format_bytes(self.config.max_waiting_bytes)
            self._on_trouble(
                f"cannot write the journal {self.path.name}: {error.strerror}; training continues, and up to {limit} "
                "of events wait in memory"
            )

    def _write_succeeded(self) -> None:
        if self._is_failing:
            self._is_failing = False
            self._on_trouble(f"the journal {self.path.name} is written again and complete")
