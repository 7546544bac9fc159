"""A node's own port under attack: crumbs, silence after the handshake and crowds; and two honest nodes find a link."""

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

from ravnest.net.addresses import Address
from ravnest.net.agree import Introduction, encode_introduction
from ravnest.net.door import Door
from ravnest.net.identity import Identity
from ravnest.net.reception import ReceptionConfig
from ravnest.net.tls import tls_context
from ravnest.net.ways import PeerInfo
from tests.net.kinds import CONFIG, DEADLINE_S, Members, Note, receive
from tests.net.kinds import run as in_thread

pytestmark = pytest.mark.timeout(60)

GREETING_S = 0.4


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


@contextlib.contextmanager
def two_doors(members: Members, **reception: object) -> Iterator[tuple[Door, Door, queue.Queue[str]]]:
    """`left` and the attacked `right`, which tells whom it refused."""
    refusals: queue.Queue[str] = queue.Queue()
    config = ReceptionConfig(on_refused=lambda address, reason: refusals.put(reason), **reception)  # type: ignore[arg-type]
    roster = frozenset(("left", "right"))
    with (
        Door(("127.0.0.1", 0), members["left"], allowed=roster.__contains__) as left,
        Door(("127.0.0.1", 0), members["right"], allowed=roster.__contains__, reception=config) as right,
    ):
        yield left, right, refusals


def check_link(left: Door, right: Door) -> None:
    """The two reach each other, and what one says the other hears."""
    calling = in_thread(left.reach, PeerInfo(name="right", addresses=(right.address,)), CONFIG, deadline_s=DEADLINE_S)
    there = right.reach(PeerInfo(name="left"), CONFIG, deadline_s=DEADLINE_S).link
    with calling.result(DEADLINE_S).link as here, there:
        here.send(Note(1), deadline_s=DEADLINE_S)
        assert receive(there) == (Note(1), [])


def shaken(address: Address, identity: Identity) -> ssl.SSLSocket:
    """A connection of a member, after the handshake."""
    context = tls_context(identity, server_side=False)
    return context.wrap_socket(socket.create_connection(address, timeout=DEADLINE_S))


def is_ended(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        while sock.recv(1000):
            pass
    return True


def test_members_who_fall_silent_after_the_handshake_are_let_go(members: Members) -> None:
    with two_doors(members, greeting_s=GREETING_S) as (left, right, refusals):
        began_s = time.monotonic()
        with shaken(right.address, members["left"]) as silent, shaken(right.address, members["left"]) as half:
            half.sendall(b"\x01" + encode_introduction(Introduction.of(7, "link"))[:9])
            check_link(left, right)
            assert is_ended(silent)
            assert is_ended(half)
            assert time.monotonic() - began_s < DEADLINE_S, "their own patience did not end it"
        for _ in range(2):
            assert "did not introduce itself" in refusals.get(timeout=DEADLINE_S)
        check_link(left, right)


def test_a_byte_at_a_time_wins_no_time(members: Members) -> None:
    with two_doors(members, greeting_s=GREETING_S) as (left, right, refusals):
        with socket.create_connection(right.address, timeout=DEADLINE_S) as slow:
            began_s = time.monotonic()
            with contextlib.suppress(OSError):
                for byte in b"\x16\x03\x01\x02\x00" + bytes(512):
                    slow.sendall(bytes([byte]))
                    time.sleep(0.01)  # this is the attack: slower than needed, faster than any silence
            assert time.monotonic() - began_s < 4.0
            assert is_ended(slow)
        assert refusals.get(timeout=DEADLINE_S)
        check_link(left, right)


def test_members_who_are_not_in_the_roster_are_refused(members: Members, tmp_path: Path) -> None:
    with two_doors(members) as (left, right, refusals):
        for identity, reason in (
            (members["third"], "third is not allowed on this link"),
            (Members(tmp_path)["left"], "could not be authenticated"),
        ):
            context = tls_context(identity, server_side=False)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(socket.create_connection(right.address, timeout=DEADLINE_S)) as guest:
                with contextlib.suppress(OSError):
                    guest.sendall(b"\x01" + encode_introduction(Introduction.of(7, "link")))
                assert is_ended(guest)
            assert reason in refusals.get(timeout=DEADLINE_S)
        check_link(left, right)


def test_a_thousand_connections_cost_a_door_little(members: Members) -> None:
    with two_doors(members, max_greetings=64, greeting_s=60.0) as (left, right, refusals):
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
        assert "slowest of too many" in refusals.get(timeout=DEADLINE_S)
