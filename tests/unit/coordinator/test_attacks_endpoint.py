"""A node's own endpoint under attack: slow bytes, silence after the handshake and many connections."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from ravnest.transport.address import Address
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import Introduction, encode_introduction
from ravnest.transport.p2p.candidates import PeerCandidates
from ravnest.transport.p2p.endpoint import AcceptorConfig, PeerEndpoint
from ravnest.transport.tls import tls_context
from tests.unit.transport.kinds import CONFIG, DEADLINE_S, Members, Note, receive
from tests.unit.transport.kinds import run as in_thread

GREETING_S = 1.0


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


@contextlib.contextmanager
def two_endpoints(
    members: Members, **reception: object
) -> Iterator[tuple[PeerEndpoint, PeerEndpoint, queue.Queue[str]]]:
    """`left` and the attacked `right`, which reports rejections."""
    rejections: queue.Queue[str] = queue.Queue()
    config = AcceptorConfig(on_rejected=lambda address, reason: rejections.put(reason), **reception)  # type: ignore[arg-type]
    roster = frozenset(("left", "right"))
    with (
        PeerEndpoint(("127.0.0.1", 0), members["left"], allowed=roster.__contains__) as left,
        PeerEndpoint(("127.0.0.1", 0), members["right"], allowed=roster.__contains__, acceptor=config) as right,
    ):
        yield left, right, rejections


def check_link(left: PeerEndpoint, right: PeerEndpoint) -> None:
    """The two connect and exchange a message."""
    calling = in_thread(
        left.connect, PeerCandidates(name="right", addresses=(right.address,)), CONFIG, deadline_s=DEADLINE_S
    )
    there = right.connect(PeerCandidates(name="left"), CONFIG, deadline_s=DEADLINE_S).link
    with calling.result(DEADLINE_S).link as here, there:
        here.send(Note(1), deadline_s=DEADLINE_S)
        assert receive(there) == (Note(1), [])


def connected(address: Address, identity: Identity) -> ssl.SSLSocket:
    """A connection of a member, after the handshake."""
    context = tls_context(identity, server_side=False)
    return context.wrap_socket(socket.create_connection(address, timeout=DEADLINE_S))


def is_ended(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        while sock.recv(1000):
            pass
    return True


def test_members_that_are_silent_after_the_handshake_are_closed(members: Members) -> None:
    with two_endpoints(members, handshake_timeout_s=GREETING_S) as (left, right, rejections):
        began_s = time.monotonic()
        with connected(right.address, members["left"]) as silent, connected(right.address, members["left"]) as half:
            half.sendall(b"\x01" + encode_introduction(Introduction.of(7, "link"))[:9])
            check_link(left, right)
            assert is_ended(silent)
            assert is_ended(half)
            assert time.monotonic() - began_s < DEADLINE_S, "before the client timeout"
        for _ in range(2):
            assert "no introduction within" in rejections.get(timeout=DEADLINE_S)
        check_link(left, right)


def test_slow_bytes_do_not_extend_the_timeout(members: Members) -> None:
    with two_endpoints(members, handshake_timeout_s=GREETING_S) as (left, right, rejections):
        with socket.create_connection(right.address, timeout=DEADLINE_S) as slow:
            num_sent, hello = 0, b"\x16\x03\x01\x02\x00" + bytes(512)
            with contextlib.suppress(OSError):
                for byte in hello:
                    slow.sendall(bytes([byte]))
                    num_sent += 1
                    time.sleep(0.01)  # this is the attack: slower than needed, faster than any silence
            assert num_sent < len(hello)
            assert is_ended(slow)
        assert rejections.get(timeout=DEADLINE_S)
        check_link(left, right)


def test_members_outside_the_roster_are_rejected(members: Members, tmp_path: Path) -> None:
    with two_endpoints(members) as (left, right, rejections):
        for identity, reason in (
            (members["third"], "third is not allowed on this link"),
            (Members(tmp_path)["left"], "could not be authenticated"),
        ):
            context = tls_context(identity, server_side=False)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(socket.create_connection(right.address, timeout=DEADLINE_S)) as node:
                with contextlib.suppress(OSError):
                    node.sendall(b"\x01" + encode_introduction(Introduction.of(7, "link")))
                assert is_ended(node)
            assert reason in rejections.get(timeout=DEADLINE_S)
        check_link(left, right)


def test_a_thousand_connections_cost_an_endpoint_little(members: Members) -> None:
    with two_endpoints(members, max_handshakes=64, handshake_timeout_s=60.0) as (left, right, rejections):
        with contextlib.ExitStack() as stack:
            stack.callback(tracemalloc.stop)
            tracemalloc.start()
            for i in range(1000):
                sock = stack.enter_context(socket.create_connection(right.address, timeout=DEADLINE_S))
                with contextlib.suppress(OSError):
                    sock.sendall([b"", b"\x16\x03\x01\x02\x00\x01"][i % 2])
            check_link(left, right)
            # A greeting has buffers of its own: a thousand of them would have 130 MB.
            assert tracemalloc.get_traced_memory()[1] < 30e6
        assert "slowest of more than 64" in rejections.get(timeout=DEADLINE_S)
