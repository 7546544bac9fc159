"""A killed peer is detected at once and not at the deadline."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from ravnest.errors import LinkClosed
from ravnest.transport.local import unix_link
from ravnest.transport.stream import StreamLink
from tests.unit.transport.kinds import CONFIG, DEADLINE_S, Members, Note, receive, run
from tests.unit.transport.peer import BIG_BYTES
from tests.unit.transport.tls_links import TlsListener

START_S = 30.0  # for a process to start on a busy machine
LONG_S = 600.0  # longer than the test timeout: no wait ends at its deadline

Living = tuple[StreamLink, "subprocess.Popen[bytes]"]


@pytest.fixture(params=["unix", "tls"])
def living(request: pytest.FixtureRequest, members: Members) -> Iterator[Living]:
    """A link to a process, and the process."""
    if request.param == "unix":
        ours, theirs = socket.socketpair()
        with (
            unix_link(ours, CONFIG, peer="child") as link,
            start("unix", str(theirs.fileno()), share=theirs) as process,
        ):
            theirs.close()
            yield link, process
        return
    with (
        TlsListener(members["right"], CONFIG, lambda name: name == "left") as listener,
        start("tls", str(listener.address[1]), str(members["left"].directory)) as process,
        listener.accept(deadline_s=START_S) as link,
    ):
        yield link, process


@contextlib.contextmanager
def start(*args: str, share: socket.socket | None = None) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.unit.transport.peer", *args]
    shared = [share.fileno()] if share is not None else []
    with subprocess.Popen(command, env=environment, pass_fds=shared) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_waiting_receiver_detects_it(living: Living) -> None:
    link, process = living
    assert receive(link, START_S) == (Note(1), [b"alive"])

    def kill(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
        process.kill()
        return [memoryview(bytearray(length)) for length in lengths]

    with pytest.raises(LinkClosed, match=r"connection to .* lost"):
        run(link.receive, kill, deadline_s=LONG_S).result(DEADLINE_S)
    assert link.closed


def test_a_blocked_sender_detects_it(living: Living) -> None:
    link, process = living
    assert receive(link, START_S) == (Note(1), [b"alive"])
    sending = run(link.send, Note(1), [bytes(BIG_BYTES)], deadline_s=LONG_S)
    process.kill()
    with pytest.raises(LinkClosed, match=r"connection to .* lost"):
        sending.result(DEADLINE_S)
    assert link.closed


def test_it_is_detected_between_frames(living: Living) -> None:
    link, process = living
    assert receive(link, START_S) == (Note(1), [b"alive"])
    process.kill()
    process.wait(DEADLINE_S)
    with pytest.raises(LinkClosed, match=r"connection to .* lost"):
        receive(link, deadline_s=LONG_S)
    with pytest.raises(LinkClosed, match="closed locally"):
        link.send(Note(1), deadline_s=LONG_S)
