"""Hole punching: dialing from the listening port, and the roles of a punched connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TypeVar

import pytest

from ravnest.core.clock import Deadline
from ravnest.errors import HandshakeError, LinkClosed, LinkError
from ravnest.transport.p2p.hole_punching import (
    dialing_socket,
    listen_reusable,
    negotiate_as_dialer,
    negotiate_as_listener,
)
from ravnest.transport.socket import Handshake, run_blocking
from tests.unit.transport.kinds import DEADLINE_S, run

T = TypeVar("T")


def finish(handshake: Handshake[T], sock: socket.socket) -> T:
    return run_blocking(handshake, sock, Deadline(DEADLINE_S))


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
        with dialing_socket(port, (target, far.getsockname()[1])) as near:
            near.setblocking(True)
            near.connect((target, far.getsockname()[1]))
            accepted, address = far.accept()
            with accepted:
                assert address[1] == port
        with socket.create_connection((target, port), timeout=DEADLINE_S), listening.accept()[0]:
            pass


def test_a_second_listener_is_rejected() -> None:
    with listen_reusable(("127.0.0.1", 0)) as first, pytest.raises(LinkError, match="cannot listen"):
        listen_reusable(first.getsockname())


def test_two_dialers_agree_on_the_tls_server() -> None:
    """In a simultaneous open, both ends of the connection have dialed."""
    with connected() as (one, other):
        serving = run(finish, negotiate_as_dialer(other, is_controlling=False), other)
        assert finish(negotiate_as_dialer(one, is_controlling=True), one) is False
        assert serving.result(DEADLINE_S) is True


@pytest.mark.parametrize("is_controlling", [True, False])
def test_an_accepted_dialer_is_the_tls_client(is_controlling: bool) -> None:
    with connected() as (one, other):
        accepting = run(finish, negotiate_as_listener(other), other)
        assert finish(negotiate_as_dialer(one, is_controlling=is_controlling), one) is False
        assert accepting.result(DEADLINE_S) is True


def test_tls_bytes_stay_unread() -> None:
    with connected() as (one, other):
        one.sendall(b"\x16hello")
        assert finish(negotiate_as_listener(other), other) is False
        assert other.recv(100) == b"\x16hello"


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1", b"RVNX", b"\x00\x00\x00\x00"])
def test_other_protocols_are_rejected(data: bytes) -> None:
    with connected() as (one, other):
        one.sendall(data)
        with pytest.raises(HandshakeError, match="unknown protocol"):
            finish(negotiate_as_listener(other), other)
    with connected() as (one, other):
        other.sendall(data)
        with pytest.raises(HandshakeError, match="unexpected response"):
            finish(negotiate_as_dialer(one, is_controlling=True), one)


def test_an_early_close_is_detected() -> None:
    for data in (b"", b"RV"):
        with connected() as (one, other):
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            with pytest.raises(LinkClosed, match="closed the connection"):
                finish(negotiate_as_listener(other), other)
