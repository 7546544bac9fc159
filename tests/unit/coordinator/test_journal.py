"""A journal restores what was written, whatever happens to the disk and to the file."""

from __future__ import annotations

import os
import resource
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.apply import apply
from ravnest.coordinator.events import Event
from ravnest.coordinator.journal import Journal, JournalConfig, replay
from ravnest.coordinator.state import CoordinatorState
from ravnest.errors import RavnestError
from tests.unit.coordinator.histories import cluster, connected, history, numbers, planned, state_of

DISK_SIZE = "256k"

EVENTS: list[Event] = [
    on.RunStarted(0.0, "r", 5, "1"),
    on.TokenIssued(0.0, "secret", 9.0, None),
    connected(1.0, "attic"),
    connected(1.0, "barn"),
    planned(2.0, cluster(1, "attic", "barn")),
    on.LeaseGranted(3.0, "c1", 0),
    on.LeaseSettled(4.0, "c1", 0),
]


def note(number: int) -> on.NoteAdded:
    return on.NoteAdded(float(number), f"note {number} " + "x" * 80)


def write(path: Path, events: list[Event]) -> None:
    journal = Journal(path)
    for event in events:
        journal.append(event)
    journal.close()


class Owner:
    """A state and its journal, as a coordinator has them, and the problems reported."""

    def __init__(self, path: Path, config: JournalConfig | None = None) -> None:
        self.state, self.problems_reported = CoordinatorState(), list[str]()
        self.journal = Journal(path, on_trouble=self.problems_reported.append, config=config)
        self.journal.compact(self.state)

    def record(self, event: Event) -> None:
        apply(self.state, event)
        self.journal.append(event)


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """Writes beyond that fail, the last one in the middle, like on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@settings(deadline=None)
@given(numbers, st.integers(0, 100))
def test_replay_restores_the_state(moves: list[tuple[int, int]], compacted_at: int) -> None:
    events = history(moves)
    with TemporaryDirectory() as directory:
        owner = Owner(Path(directory) / "journal")
        for number, event in enumerate(events):
            owner.record(event)
            if number == compacted_at:
                owner.journal.compact(owner.state)
        owner.journal.close()
        assert replay(Path(directory) / "journal") == (owner.state, [])


def test_a_missing_file_is_empty_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert replay(path) == (CoordinatorState(), [])
    path.touch(mode=0o644)
    write(path, EVENTS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    Journal(path).compact(state_of(EVENTS))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["journal"]


def test_a_journal_truncated_at_any_byte_restores_the_events_before(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, EVENTS)
    data = path.read_bytes()
    states = [state_of(EVENTS[:n]) for n in range(len(EVENTS) + 1)]
    whole = 0
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        state, problems = replay(path)
        whole += whole < len(EVENTS) and state == states[whole + 1]
        assert state == states[whole]
        assert (not problems) == (path.stat().st_size == length)
        write(path, [note(1)])  # events can be appended
        after, problems = replay(path)
        assert not problems
        assert after.recent_events[-1] == (1.0, note(1).text)
        assert len(after.recent_events) == len(state.recent_events) + 1
    assert whole == len(EVENTS)


def test_a_journal_with_any_byte_changed_restores_the_events_before(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, EVENTS)
    data = path.read_bytes()
    states = [state_of(EVENTS[:n]) for n in range(len(EVENTS))]
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x11]) + data[place + 1 :])
        state, problems = replay(path)
        assert problems
        assert state in states
        kept = path.read_bytes() + (tmp_path / "journal.cut").read_bytes()
        assert kept[:place] + kept[place + 1 :] == data[:place] + data[place + 1 :], "no byte is lost"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_not_an_error(garbage: bytes) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        write(path, EVENTS)
        with path.open("ab") as file:
            file.write(garbage)
        state, problems = replay(path)
        assert state == state_of(EVENTS)
        assert bool(problems) == bool(garbage)
        path.write_bytes(garbage)
        assert replay(path)[0] == CoordinatorState()


@pytest.mark.parametrize(("event", "reason"), [
    (on.LeaseGranted(5.0, "c1", 77), "batch 77 granted before batch 1"),
    (planned(5.0, cluster(2, "attic", "barn"), generation=2), "attic is in two clusters"),
    (planned(5.0, cluster(3, "unknown"), generation=2), "unknown"),
])  # fmt: skip
def test_a_record_that_cannot_be_applied_is_moved_away(tmp_path: Path, event: Event, reason: str) -> None:
    path = tmp_path / "journal"
    write(path, [*EVENTS, event, note(1)])
    state, problems = replay(path)
    assert state == state_of(EVENTS)
    assert reason in problems[0]
    assert replay(path) == (state, [])


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    state, problems = replay(tmp_path)
    assert state == CoordinatorState()
    assert "cannot read" in problems[0]
    with pytest.raises(RavnestError, match="cannot open"):
        Journal(tmp_path)


def test_nothing_is_on_disk_before_a_flush(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "journal")
    owner.record(note(1))
    assert replay(owner.journal.path)[0] == CoordinatorState()
    assert owner.journal.waiting_bytes > 0
    assert owner.journal.flush(sync=True)
    assert owner.journal.waiting_bytes == 0
    assert replay(owner.journal.path)[0] == owner.state


def test_a_journal_that_grew_is_replaced_by_a_snapshot(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "journal", JournalConfig(compact_bytes=10_000))
    for event in EVENTS:
        owner.record(event)
    sizes = []
    for number in range(1, 3000):
        owner.record(on.LeaseGranted(5.0, "c1", number))
        owner.record(on.LeaseSettled(5.0, "c1", number))
        owner.journal.flush()
        sizes.append(owner.journal.path.stat().st_size)
    assert max(sizes) < 12_000
    assert replay(owner.journal.path) == (owner.state, [])


def test_events_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "journal")
    size = owner.journal.path.stat().st_size
    with no_file_larger_than(size + 500):
        for number in range(20):
            owner.record(note(number))
            owner.journal.flush()
        assert not owner.journal.flush()
        assert len(owner.problems_reported) == 1
        assert "File too large; training continues" in owner.problems_reported[0]
        # The file ends in an incomplete write: a reader of a copy gets the complete records.
        copy = tmp_path / "copy"
        copy.write_bytes(owner.journal.path.read_bytes())
        assert 1 <= len(replay(copy)[0].recent_events) < 20
    assert owner.journal.flush()
    assert owner.problems_reported[1:] == ["the journal journal is written again and complete"]
    assert replay(owner.journal.path) == (owner.state, [])


def test_too_many_waiting_events_become_a_snapshot(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "journal", JournalConfig(max_waiting_bytes=2000))
    size = owner.journal.path.stat().st_size
    with no_file_larger_than(size + 100):
        for number in range(200):
            owner.record(note(number))
            assert owner.journal.waiting_bytes <= 2000
        assert owner.journal.has_dropped
        assert not owner.journal.flush()
        assert not owner.journal.compact(owner.state)
    assert os.listdir(tmp_path) == ["journal"]
    owner.record(note(1000))
    assert owner.journal.flush()
    owner.record(note(1001))
    owner.journal.close()
    assert len(owner.problems_reported) == 2
    assert replay(owner.journal.path) == (owner.state, [])


def test_a_snapshot_without_disk_space_leaves_the_old_file(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "journal", JournalConfig(compact_bytes=150))
    owner.state.log(0.0, "x" * 400)  # the snapshot is larger than the events
    size = owner.journal.path.stat().st_size
    with no_file_larger_than(size + 400):
        for _ in range(2):
            owner.record(note(0))
            assert owner.journal.flush()
    assert "cannot write" in owner.problems_reported[0]
    assert os.listdir(tmp_path) == ["journal"]
    state, problems = replay(owner.journal.path)
    assert not problems
    assert len(state.recent_events) == 2
    assert owner.journal.compact(owner.state)
    assert replay(owner.journal.path) == (owner.state, [])


def test_a_device_that_is_always_full() -> None:
    problems_reported = list[str]()
    mode = os.stat("/dev/full").st_mode
    journal = Journal(Path("/dev/full"), on_trouble=problems_reported.append)
    for number in range(3):
        journal.append(note(number))
        assert not journal.flush()
    journal.close()
    assert len(problems_reported) == 1
    assert "No space left on device" in problems_reported[0]
    assert journal.waiting_bytes > 240
    assert os.stat("/dev/full").st_mode == mode, "the mode of a device is not changed"


def test_a_disk_gets_full_and_has_space_again(small_disk: Path) -> None:
    owner = Owner(small_disk / "journal", JournalConfig(max_waiting_bytes=20_000))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(180_000))
    number = 0
    while not owner.journal.has_dropped:
        owner.record(note(number))
        owner.journal.flush()
        number += 1
        assert number < 10_000
    assert not owner.journal.flush()
    ballast.unlink()
    assert owner.journal.flush()
    owner.record(note(number))
    owner.journal.close()
    assert len(owner.problems_reported) == 2
    assert "No space left on device" in owner.problems_reported[0]
    assert replay(owner.journal.path) == (owner.state, [])


def test_a_journal_of_an_older_format_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    payload = msgspec.msgpack.encode({"type": "Snapshot", "state": b""})
    path.write_bytes(struct.pack("!II", len(payload), crc32(payload)) + payload)
    with pytest.raises(RavnestError, match="has format 1, this release reads format 2"):
        replay(path)
