"""Local endpoints: nodes of one host connect over unix sockets, in any order, whatever other clients do."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import pytest

from ravnest.errors import HandshakeError, LinkClosed, LinkError, LinkTimeout
from ravnest.transport import local
from ravnest.transport.introduction import Introduction, encode_introduction
from ravnest.transport.local import (
    HELLO_BYTES,
    LocalEndpoint,
    connect_local,
    control_socket,
    decode_hello,
    listen_local,
    socket_path,
)
from tests.unit.transport.kinds import run

DEADLINE_S = 60.0
LINK = Introduction.of(3, "stage")
Open = Callable[[str], LocalEndpoint]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a short path, as sockets need."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def open_endpoint(directory: Path) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def make(name: str) -> LocalEndpoint:
            endpoint = LocalEndpoint(directory, name)
            stack.callback(endpoint.close)
            return endpoint

        yield make


def call(endpoint: LocalEndpoint, peer: str, introduction: Introduction = LINK) -> Future[socket.socket]:
    return run(endpoint.connect, peer, introduction, deadline_s=DEADLINE_S)


def hello(name: str, introduction: Introduction = LINK) -> bytes:
    return name.encode().ljust(64, b"\0") + encode_introduction(introduction)


def dial(directory: Path, name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(DEADLINE_S)
    sock.connect(str(socket_path(directory, name)))
    return sock


def check_connected(*calls: Future[socket.socket]) -> None:
    """Both ends of a call carry bytes in both directions."""
    left, right = (one.result(DEADLINE_S) for one in calls)
    with left, right:
        for sender, receiver in ((left, right), (right, left)):
            receiver.settimeout(DEADLINE_S)
            sender.sendall(b"ping")
            assert receiver.recv(4) == b"ping"


@pytest.mark.parametrize("names", [("anna", "bert"), ("bert", "anna")], ids=str)
def test_two_nodes_connect_in_both_orders(open_endpoint: Open, names: tuple[str, str]) -> None:
    first, second = (open_endpoint(name) for name in names)
    check_connected(call(first, names[1]), call(second, names[0]))


@pytest.mark.parametrize("late", ["anna", "bert"])
def test_an_endpoint_that_opens_late_is_connected(open_endpoint: Open, late: str) -> None:
    early = "bert" if late == "anna" else "anna"
    waiting = call(open_endpoint(early), late)
    check_connected(waiting, call(open_endpoint(late), early))


def test_links_with_several_purposes_and_peers_are_not_mixed_up(open_endpoint: Open) -> None:
    anna, bert, clara = (open_endpoint(name) for name in ("anna", "bert", "clara"))
    ring = Introduction.of(3, "ring")
    ends = [
        (call(anna, "clara"), call(clara, "anna")),
        (call(anna, "clara", ring), call(clara, "anna", ring)),
        (call(bert, "clara"), call(clara, "bert")),
    ]
    for pair in ends:
        check_connected(*pair)


def test_a_newer_call_replaces_an_older(open_endpoint: Open) -> None:
    anna, bert = open_endpoint("anna"), open_endpoint("bert")
    calls = [call(bert, "anna"), call(bert, "anna")]  # either may be the newer one
    (older,), (newer,) = wait(calls, DEADLINE_S, FIRST_COMPLETED)
    with pytest.raises(LinkClosed, match="newer call"):
        older.result(DEADLINE_S)
    check_connected(call(anna, "bert"), newer)


def test_a_newer_connection_replaces_an_older(directory: Path, open_endpoint: Open) -> None:
    bert = open_endpoint("bert")
    with dial(directory, "bert") as older:
        older.sendall(hello("anna"))
        with dial(directory, "bert") as newer:
            newer.sendall(hello("anna"))
            assert older.recv(1) == b"", "closed when the newer one arrived"
            with bert.connect("anna", LINK, deadline_s=DEADLINE_S):
                assert newer.recv(100) == encode_introduction(LINK)


def test_a_peer_that_gave_up_is_not_connected(directory: Path, open_endpoint: Open) -> None:
    anna, bert = open_endpoint("anna"), open_endpoint("bert")
    with dial(directory, "bert") as gone:
        gone.sendall(hello("anna"))
    check_connected(call(anna, "bert"), call(bert, "anna"))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(HELLO_BYTES),
        b"\xff" * HELLO_BYTES,
        hello("anna")[:-1] + b"\0",
        hello("../../anna"),
        hello("anna")[:64] + b"RVNI\x09" + bytes(HELLO_BYTES - 64 - 5),
    ],
    ids=["nothing", "HTTP", "zeros", "garbage", "another purpose", "a path as name", "another format"],
)
def test_bad_hellos_are_dropped_and_others_connect(directory: Path, open_endpoint: Open, sent: bytes) -> None:
    anna, bert = open_endpoint("anna"), open_endpoint("bert")
    with dial(directory, "bert") as bad:
        bad.sendall(sent)
        with contextlib.suppress(OSError):  # it may be dropped already
            bad.shutdown(socket.SHUT_WR)
        check_connected(call(anna, "bert"), call(bert, "anna"))


def test_a_silent_client_is_dropped(directory: Path, open_endpoint: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_HELLO_S", 0.05)
    anna, bert = open_endpoint("anna"), open_endpoint("bert")
    with dial(directory, "bert") as silent:
        silent.sendall(hello("anna")[:-1])
        assert silent.recv(1) == b""
        check_connected(call(anna, "bert"), call(bert, "anna"))


def test_connections_that_wait_are_limited(
    directory: Path, open_endpoint: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_MAX_WAITING", 2)
    open_endpoint("bert")
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(dial(directory, "bert")) for _ in range(3)]
        for number, sock in enumerate(socks):
            sock.sendall(hello(f"anna{number}"))
        assert socks[0].recv(1) == b"", "the oldest is closed"


def test_the_answer_must_be_for_the_same_link(directory: Path) -> None:
    with listen_local(socket_path(directory, "bert")) as listener:
        listener.settimeout(DEADLINE_S)
        connecting = run(connect_local, socket_path(directory, "bert"), "anna", LINK, deadline_s=DEADLINE_S)
        sock, _ = listener.accept()
        with sock:
            assert decode_hello(sock.recv(HELLO_BYTES, socket.MSG_WAITALL)) == ("anna", LINK)
            sock.sendall(encode_introduction(Introduction.of(4, "stage")))
            with pytest.raises(HandshakeError, match="generation 4"):
                connecting.result(DEADLINE_S)


@pytest.mark.parametrize("names", [("anna", "bert"), ("bert", "anna")], ids=["calls", "is called"])
def test_a_missing_peer_is_a_timeout(open_endpoint: Open, names: tuple[str, str]) -> None:
    with pytest.raises(LinkTimeout, match=names[1]):
        open_endpoint(names[0]).connect(names[1], LINK, deadline_s=0.05)


def test_a_node_has_no_link_to_itself(open_endpoint: Open) -> None:
    with pytest.raises(ValueError, match="itself"):
        open_endpoint("anna").connect("anna", LINK, deadline_s=DEADLINE_S)


def test_closing_ends_waiting_calls_and_removes_the_socket(directory: Path, open_endpoint: Open) -> None:
    bert = open_endpoint("bert")
    waiting = call(bert, "anna")
    with dial(directory, "bert") as arrived:
        arrived.sendall(hello("clara"))
        bert.close()
        with pytest.raises(LinkClosed, match="closed locally"):
            waiting.result(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):  # if it was not read yet
            assert arrived.recv(1) == b""
    assert not list(directory.iterdir())
    with pytest.raises(LinkClosed, match="closed locally"):
        bert.connect("anna", LINK, deadline_s=DEADLINE_S)


def test_a_closed_endpoint_leaves_its_connections_open(open_endpoint: Open) -> None:
    anna, bert = open_endpoint("anna"), open_endpoint("bert")
    calls = call(anna, "bert"), call(bert, "anna")
    for one in calls:
        one.result(DEADLINE_S)
    anna.close()
    bert.close()
    check_connected(*calls)


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701], ids=oct)
def test_a_directory_that_others_may_enter_is_refused(directory: Path, mode: int) -> None:
    directory.chmod(mode)
    with pytest.raises(LinkError, match="chmod 700"):
        LocalEndpoint(directory, "anna")
    assert not list(directory.iterdir())


def test_a_missing_directory_is_created_for_this_user_alone(directory: Path) -> None:
    LocalEndpoint(directory / "a" / "b", "anna").close()
    assert (directory / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_the_socket_of_a_dead_process_is_replaced(directory: Path, open_endpoint: Open) -> None:
    listen_local(socket_path(directory, "anna")).close()  # as a killed process: the file stays
    assert socket_path(directory, "anna").is_socket()
    check_connected(call(open_endpoint("anna"), "bert"), call(open_endpoint("bert"), "anna"))


def test_the_socket_of_a_live_process_is_not_replaced(directory: Path, open_endpoint: Open) -> None:
    anna = open_endpoint("anna")
    with pytest.raises(LinkError, match="another process listens"):
        LocalEndpoint(directory, "anna")
    check_connected(call(anna, "bert"), call(open_endpoint("bert"), "anna"))


def test_a_file_in_place_of_the_socket_is_kept(directory: Path) -> None:
    control_socket(directory).write_text("not a socket")
    with pytest.raises(LinkError, match="cannot listen"):
        listen_local(control_socket(directory))
    assert control_socket(directory).read_text() == "not a socket"


def test_a_path_that_is_too_long_is_refused(directory: Path) -> None:
    with pytest.raises(LinkError, match="shorter directory"):
        LocalEndpoint(directory / ("x" * 110), "anna")
    with pytest.raises(LinkError, match="shorter directory"):
        connect_local(directory / ("x" * 110) / "anna.sock", "bert", LINK, deadline_s=DEADLINE_S)
