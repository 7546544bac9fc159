"""A journal gives back what was written, whatever became of the disk and of the file."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.events import Event
from ravnest.coordinator.journal import Journal, JournalConfig, replay
from ravnest.coordinator.state import State, apply
from ravnest.core.errors import RavnestError
from tests.coordinator.histories import cluster, connected, history, numbers, planned, state_of

DISK_SIZE = "256k"

EVENTS: list[Event] = [
    on.RunBegun(0.0, "r", 5, "1"),
    on.TokenIssued(0.0, "secret", 9.0, None),
    connected(1.0, "attic"),
    connected(1.0, "barn"),
    planned(2.0, cluster(1, "attic", "barn")),
    on.LeaseGranted(3.0, "c1", 0),
    on.LeaseSettled(4.0, "c1", 0),
]


def note(number: int) -> on.Noted:
    return on.Noted(float(number), f"note {number} " + "x" * 80)


def write(path: Path, events: list[Event]) -> None:
    journal = Journal(path)
    for event in events:
        journal.append(event)
    journal.close()


class Owner:
    """A state and its journal, as a coordinator has them; what it was told of trouble."""

    def __init__(self, path: Path, config: JournalConfig | None = None) -> None:
        self.state, self.told = State(), list[str]()
        self.journal = Journal(path, on_trouble=self.told.append, config=config)
        self.journal.compact(self.state)

    def record(self, event: Event) -> None:
        apply(self.state, event)
        self.journal.append(event)


@contextmanager
def no_file_larger_than(num_bytes: int) -> Iterator[None]:
    """Writes beyond that fail, the last one after a part of it: as on a disk that gets full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@settings(deadline=None)
@given(numbers, st.integers(0, 100))
def test_what_was_written_comes_back(moves: list[tuple[int, int]], compacted_at: int) -> None:
    events = history(moves)
    with TemporaryDirectory() as directory:
        owner = Owner(Path(directory) / "journal")
        for number, event in enumerate(events):
            owner.record(event)
            if number == compacted_at:
                owner.journal.compact(owner.state)
        owner.journal.close()
        assert replay(Path(directory) / "journal") == (owner.state, [])


def test_no_file_is_an_empty_one_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert replay(path) == (State(), [])
    path.touch(mode=0o644)
    write(path, EVENTS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    Journal(path).compact(state_of(EVENTS))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["journal"]


def test_a_journal_cut_at_any_byte_gives_the_events_before_it(tmp_path: Path) -> None:
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
        write(path, [note(1)])  # and it goes on behind what is good
        after, problems = replay(path)
        assert not problems
        assert after.words[-1] == (1.0, note(1).text)
        assert len(after.words) == len(state.words) + 1
    assert whole == len(EVENTS)


def test_a_journal_with_any_byte_changed_gives_the_events_before_it(tmp_path: Path) -> None:
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
        assert kept[:place] + kept[place + 1 :] == data[:place] + data[place + 1 :], "no byte is thrown away"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_no_error(garbage: bytes) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        write(path, EVENTS)
        with path.open("ab") as file:
            file.write(garbage)
        state, problems = replay(path)
        assert state == state_of(EVENTS)
        assert bool(problems) == bool(garbage)
        path.write_bytes(garbage)
        assert replay(path)[0] == State()


@pytest.mark.parametrize(("event", "why"), [
    (on.LeaseGranted(5.0, "c1", 77), "batch 77 is granted before batch 1"),
    (planned(5.0, cluster(2, "attic", "barn"), generation=2), "attic is planned twice"),
    (planned(5.0, cluster(3, "nobody"), generation=2), "nobody"),
])  # fmt: skip
def test_a_record_that_cannot_follow_is_cut_off(tmp_path: Path, event: Event, why: str) -> None:
    path = tmp_path / "journal"
    write(path, [*EVENTS, event, note(1)])
    state, problems = replay(path)
    assert state == state_of(EVENTS)
    assert why in problems[0]
    assert replay(path) == (state, [])


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    state, problems = replay(tmp_path)
    assert state == State()
    assert "cannot be read" in problems[0]
    with pytest.raises(RavnestError, match="cannot be opened"):
        Journal(tmp_path)


def test_nothing_is_on_disk_before_a_flush(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "journal")
    owner.record(note(1))
    assert replay(owner.journal.path)[0] == State()
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


def test_events_wait_for_a_full_disk(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "journal")
    size = owner.journal.path.stat().st_size
    with no_file_larger_than(size + 500):
        for number in range(20):
            owner.record(note(number))
            owner.journal.flush()
        assert not owner.journal.flush()
        assert len(owner.told) == 1
        assert "cannot be written: File too large; training goes on" in owner.told[0]
        # The file ends in a torn write: whoever reads a copy of it now gets what was whole.
        copy = tmp_path / "copy"
        copy.write_bytes(owner.journal.path.read_bytes())
        assert 1 <= len(replay(copy)[0].words) < 20
    assert owner.journal.flush()
    assert owner.told[1:] == ["the journal journal is written again, and complete"]
    assert replay(owner.journal.path) == (owner.state, [])


def test_more_events_than_may_wait_become_a_snapshot(tmp_path: Path) -> None:
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
    assert len(owner.told) == 2
    assert replay(owner.journal.path) == (owner.state, [])


def test_a_snapshot_that_finds_no_room_leaves_the_old_file(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "journal", JournalConfig(compact_bytes=150))
    owner.state.say(0.0, "x" * 400)  # the snapshot is larger than the events
    size = owner.journal.path.stat().st_size
    with no_file_larger_than(size + 400):
        for _ in range(2):
            owner.record(note(0))
            assert owner.journal.flush()
    assert "cannot be written" in owner.told[0]
    assert os.listdir(tmp_path) == ["journal"]
    state, problems = replay(owner.journal.path)
    assert not problems
    assert len(state.words) == 2
    assert owner.journal.compact(owner.state)
    assert replay(owner.journal.path) == (owner.state, [])


def test_a_device_that_is_always_full() -> None:
    told = list[str]()
    mode = os.stat("/dev/full").st_mode
    journal = Journal(Path("/dev/full"), on_trouble=told.append)
    for number in range(3):
        journal.append(note(number))
        assert not journal.flush()
    journal.close()
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert journal.waiting_bytes > 240
    assert os.stat("/dev/full").st_mode == mode, "a device is not ours to make private"


def test_a_real_disk_gets_full_and_has_room_again(small_disk: Path) -> None:
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
    assert len(owner.told) == 2
    assert "No space left on device" in owner.told[0]
    assert replay(owner.journal.path) == (owner.state, [])
