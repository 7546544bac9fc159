"""A copy over a link: whole and unchanged, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ravnest.core.errors import FrameError, LinkError, RavnestError
from ravnest.net.link import LinkConfig
from ravnest.net.memory import memory_pair
from ravnest.net.stream import StreamLink
from ravnest.node.passing import MESSAGES, Ask, Done, NotGiven, Offer, Piece, give, receive

Ends = tuple[StreamLink, StreamLink]
CONTENT = bytes(range(256)) * 3000


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = memory_pair(LinkConfig(headers=MESSAGES, generation=7))
    with left, right:
        yield left, right


def meanwhile(work: Any) -> Future[Any]:
    """In a thread; what it returns or raises is in the future."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # for whoever asks
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def no_bytes(header: object, lengths: tuple[int, ...]) -> list[memoryview]:
    return []


def test_a_copy_comes_whole_and_the_giver_hears_what_is_wanted(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    asked: list[tuple[str, ...]] = []

    def prepare(names: tuple[str, ...]) -> tuple[Path, int]:
        asked.append(names)
        return tmp_path / "a", 140

    turns: list[float] = []

    def turn(wait_s: float) -> bool:
        turns.append(wait_s)
        return True

    given = meanwhile(lambda: give(ends[0], prepare, turn=turn))
    assert receive(ends[1], ("w", "b"), tmp_path / "b", max_bytes=len(CONTENT)) == 140
    assert (tmp_path / "b").read_bytes() == CONTENT
    assert given.result(10) == len(CONTENT)
    assert asked == [("w", "b")]
    assert len(turns) == -(-len(CONTENT) // 2**18)  # before every piece


def test_who_cannot_give_says_why(ends: Ends, tmp_path: Path) -> None:
    def prepare(names: tuple[str, ...]) -> tuple[Path, int]:
        raise RavnestError("there is no copy here")

    given = meanwhile(lambda: give(ends[0], prepare))
    with pytest.raises(NotGiven, match="there is no copy here"):
        receive(ends[1], (), tmp_path / "b", max_bytes=100)
    with pytest.raises(RavnestError, match="no copy"):
        given.result(10)


def test_more_than_a_stage_needs_is_refused_before_it_comes(ends: Ends, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    meanwhile(lambda: give(ends[0], lambda names: (tmp_path / "a", 1)))
    with pytest.raises(FrameError, match="needs at most 1000"):
        receive(ends[1], (), tmp_path / "b", max_bytes=1000)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("fault", ["changed", "short", "long", "unexpected", "huge"])
def test_a_giver_that_cheats_is_found_out(ends: Ends, tmp_path: Path, fault: str) -> None:
    def cheat() -> None:
        link = ends[0]
        assert isinstance(link.receive(no_bytes, deadline_s=5.0), Ask)
        link.send(Offer(3, 1000), deadline_s=5.0)
        link.send(Piece(), [b"x" * 600], deadline_s=5.0)
        match fault:
            case "changed":
                link.send(Piece(), [b"x" * 400], deadline_s=5.0)
                link.send(Done("0" * 64), deadline_s=5.0)
            case "short":
                link.send(Done("0" * 64), deadline_s=5.0)
            case "long":
                link.send(Piece(), [b"x" * 401], deadline_s=5.0)
            case "unexpected":
                link.send(Offer(3, 1000), deadline_s=5.0)
            case "huge":
                link.send(Piece(), [b"x" * 2**19], deadline_s=5.0)

    meanwhile(cheat)
    with pytest.raises(LinkError):
        receive(ends[1], (), tmp_path / "b", max_bytes=2**20)
