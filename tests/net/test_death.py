"""A peer that is killed, by the system and without a word, is noticed at once and not at the deadline."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ravnest.core.errors import LinkClosed
from ravnest.net.stream import StreamLink
from ravnest.net.tls import listen_tls
from ravnest.net.unix import listen_unix
from tests.net.kinds import CONFIG, DEADLINE_S, Members, Note, receive, run
from tests.net.peer import BIG_BYTES

pytestmark = pytest.mark.timeout(60)

START_S = 30.0  # for a Python to start on a busy machine
LONG_S = 600.0  # longer than the test may take: a deadline cannot be what ended the wait

Living = tuple[StreamLink, "subprocess.Popen[bytes]"]


@pytest.fixture(params=["unix", "tls"])
def living(request: pytest.FixtureRequest, members: Members, tmp_path: Path) -> Iterator[Living]:
    """A link to a process, and the process."""
    if request.param == "unix":
        listener = listen_unix(tmp_path / "private" / "s", CONFIG)
        words = ["unix", listener.address]
    else:
        listener = listen_tls(("127.0.0.1", 0), members["right"], CONFIG, allowed=lambda name: name == "left")
        words = ["tls", str(listener.address[1]), str(members["left"].directory)]
    with listener, start(words) as process, listener.accept(deadline_s=START_S) as link:
        yield link, process


@contextlib.contextmanager
def start(words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-m", "tests.net.peer", *words], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_waiting_receiver_notices(living: Living) -> None:
    link, process = living
    assert receive(link) == (Note(1), [b"alive"])

    def kill(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
        process.kill()
        return [memoryview(bytearray(length)) for length in lengths]

    with pytest.raises(LinkClosed, match="closed the link or died"):
        run(link.receive, kill, deadline_s=LONG_S).result(DEADLINE_S)
    assert link.closed


def test_a_blocked_sender_notices(living: Living) -> None:
    link, process = living
    assert receive(link) == (Note(1), [b"alive"])
    sending = run(link.send, Note(1), [bytes(BIG_BYTES)], deadline_s=LONG_S)
    process.kill()
    with pytest.raises(LinkClosed, match="closed the link or died"):
        sending.result(DEADLINE_S)
    assert link.closed


def test_others_notice_between_frames(living: Living) -> None:
    link, process = living
    assert receive(link) == (Note(1), [b"alive"])
    process.kill()
    process.wait(DEADLINE_S)
    with pytest.raises(LinkClosed, match="closed the link or died"):
        receive(link, deadline_s=LONG_S)
    with pytest.raises(LinkClosed, match="on this side"):
        link.send(Note(1), deadline_s=LONG_S)
