"""Dialling from the port one listens on, and finding out who is at the other end of a punched connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator, Iterator
from typing import TypeVar

import pytest

from ravnest.core.errors import HandshakeError, LinkClosed, LinkError
from ravnest.net.deadline import Deadline
from ravnest.net.punch import accept_words, dial_words, listen_reusable, socket_at
from ravnest.net.sockets import wait_ready
from tests.net.kinds import DEADLINE_S, run

pytestmark = pytest.mark.timeout(60)

T = TypeVar("T")


def finish(steps: Generator[int, None, T], sock: socket.socket) -> T:
    deadline = Deadline(DEADLINE_S)
    while True:
        try:
            event = next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        assert wait_ready(sock, event, deadline.left_s())


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_one_port_listens_and_dials(host: str) -> None:
    target = "::1" if host == "::1" else "127.0.0.1"
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with listen_reusable((host, 0)) as listening, socket.create_server((target, 0), family=family) as far:
        port = listening.getsockname()[1]
        with socket_at(port, (target, far.getsockname()[1])) as near:
            near.setblocking(True)
            near.connect((target, far.getsockname()[1]))
            accepted, address = far.accept()
            with accepted:
                assert address[1] == port
        with socket.create_connection((target, port), timeout=DEADLINE_S), listening.accept()[0]:
            pass


def test_a_second_listener_is_refused() -> None:
    with listen_reusable(("127.0.0.1", 0)) as first, pytest.raises(LinkError, match="cannot listen"):
        listen_reusable(first.getsockname())


def test_two_diallers_agree_who_is_the_server() -> None:
    """When the dials meet on the way, both ends of the connection have dialled."""
    with connected() as (one, other):
        serving = run(finish, dial_words(other, is_smaller=False), other)
        assert finish(dial_words(one, is_smaller=True), one) is False
        assert serving.result(DEADLINE_S) is True


@pytest.mark.parametrize("is_smaller", [True, False])
def test_a_dialler_who_was_accepted_is_the_client(is_smaller: bool) -> None:
    with connected() as (one, other):
        accepting = run(finish, accept_words(other), other)
        assert finish(dial_words(one, is_smaller=is_smaller), one) is False
        assert accepting.result(DEADLINE_S) is True


def test_what_begins_with_tls_is_not_touched() -> None:
    with connected() as (one, other):
        one.sendall(b"\x16hello")
        assert finish(accept_words(other), other) is False
        assert other.recv(100) == b"\x16hello"


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1", b"RVNX", b"\x00\x00\x00\x00"])
def test_other_words_are_refused(words: bytes) -> None:
    with connected() as (one, other):
        one.sendall(words)
        with pytest.raises(HandshakeError, match="not one of a node"):
            finish(accept_words(other), other)
    with connected() as (one, other):
        other.sendall(words)
        with pytest.raises(HandshakeError, match="not how a node answers"):
            finish(dial_words(one, is_smaller=True), one)


def test_who_leaves_early_is_noticed() -> None:
    for words in (b"", b"RV"):
        with connected() as (one, other):
            one.sendall(words)
            one.shutdown(socket.SHUT_WR)
            with pytest.raises(LinkClosed, match="left"):
                finish(accept_words(other), other)
