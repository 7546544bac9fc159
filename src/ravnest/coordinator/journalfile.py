"""The form of a journal on disk, and how one is read: whatever is in the file, a state comes out.

    journal    record, record, ...         each written once, at the end
    record     length u32 | crc32 u32 | length bytes of MessagePack: an event, or the snapshot of a whole state

Integers are in network byte order. A write that was cut short, by a crash or a full disk, spoils nothing before it:
the reader takes what is whole, and cuts off the rest.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from stat import S_ISREG
from zlib import crc32

import msgspec

from ..core.config import format_bytes
from .events import Event
from .state import State, apply, restore

__all__ = ["Snapshot", "encode_record", "open_private", "replay", "write_all", "write_new"]

_HEAD = struct.Struct("!II")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class Snapshot(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A whole state (`state.snapshot`); it makes all before it needless."""

    state: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event | Snapshot)


def replay(path: Path) -> tuple[State, list[str]]:
    """The state of a journal, and what was wrong with the file in sentences. No file is an empty one.

    What cannot be read is cut off, so that events can be added behind what can; it is kept in a file beside it.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return State(), []
    except OSError as error:
        return State(), [f"the journal {path.name} cannot be read: {error.strerror}"]
    state, good_bytes, problem = _fold(data)
    if problem is None:
        return state, []
    if good_bytes < len(data):
        state, _, _ = _fold(data[:good_bytes])  # an event that failed may have changed something first
    return state, [problem, *_cut_off(path, data, good_bytes)]


def _fold(data: bytes) -> tuple[State, int, str | None]:
    """The state after all good records, where they end, and what is wrong with the next."""
    state, start = State(), 0
    while start < len(data):
        where = f"the journal has a record at byte {start} of {len(data)} that"
        if len(data) - start < _HEAD.size:
            return state, start, f"{where} was cut short"
        length, checksum = _HEAD.unpack_from(data, start)
        payload = data[start + _HEAD.size : start + _HEAD.size + length]
        if len(payload) < length:
            return state, start, f"{where} was cut short"
        if crc32(payload) != checksum:
            return state, start, f"{where} is damaged"
        try:
            record = _decoder.decode(payload)
            if isinstance(record, Snapshot):
                state = restore(record.state)
            else:
                apply(state, record)
        except (msgspec.MsgspecError, AssertionError, KeyError) as error:
            return state, start, f"{where} makes no sense here: {error}"
        start += _HEAD.size + length
    return state, start, None


def _cut_off(path: Path, data: bytes, good_bytes: int) -> list[str]:
    kept = path.with_name(path.name + ".cut")
    rest, problems = len(data) - good_bytes, list[str]()
    try:
        write_new(kept, data[good_bytes:])
        problems.append(f"its last {format_bytes(rest)} are in {kept.name} now")
    except OSError as error:
        problems.append(f"its last {format_bytes(rest)} could not be kept: {error.strerror}")
    try:
        os.truncate(path, good_bytes)
    except OSError as error:
        problems.append(f"the journal {path.name} cannot be cut: {error.strerror}")
    return problems


def encode_record(what: Event | Snapshot) -> bytes:
    payload = _encoder.encode(what)
    return _HEAD.pack(len(payload), crc32(payload)) + payload


def open_private(path: Path, more: int = 0) -> int:
    """For appending, readable by this user only, also if it was there before."""
    file = os.open(path, _FLAGS | more, 0o600)
    if hasattr(os, "fchmod") and S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, 0o600)
    return file


def write_all(file: int, data: bytes | bytearray) -> None:
    rest = memoryview(bytes(data))
    while rest:
        rest = rest[os.write(file, rest) :]


def write_new(path: Path, data: bytes) -> None:
    """A whole file, on the platter."""
    file = open_private(path, os.O_TRUNC)
    try:
        write_all(file, data)
        os.fsync(file)
    finally:
        os.close(file)
