"""The relay: what it carries, whom it joins, and what it does with those who mean harm or say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ravnest.core.errors import HandshakeError, LinkClosed, LinkTimeout
from ravnest.net.frame import encode_head
from ravnest.net.front import FrontConfig
from ravnest.net.hello import Join, Observe, encode_note
from ravnest.net.hub import HubConfig, RelayHub
from ravnest.net.link import LinkConfig
from ravnest.net.stream import StreamLink
from ravnest.net.tunnel import RelayInfo, dial_relay
from tests.net import test_links
from tests.net.kinds import CONFIG, DEADLINE_S, Members, Note, Pair, receive, run
from tests.net.relaying import PAGE, TOKEN, RelayServer

pytestmark = pytest.mark.timeout(60)

for _name, _test in list(vars(test_links).items()):  # what every link does, this one does too
    if _name.startswith("test_"):
        globals()[_name] = _test


def join(members: Members, relay: RelayInfo, me: str, peer: str, deadline_s: float = DEADLINE_S) -> StreamLink:
    return dial_relay(relay, members[me], CONFIG, peer=peer, deadline_s=deadline_s)


@contextlib.contextmanager
def joined(members: Members, relay: RelayInfo) -> Iterator[Pair]:
    coming = run(join, members, relay, "right", "left")
    with join(members, relay, "left", "right") as left, coming.result(DEADLINE_S) as right:
        yield left, right


class RelayKind:
    """Links through a relay, for the suite."""

    name = "relay"
    big_bytes = 16 * 10**6
    in_flight_bytes = 2 * 64 * 2**20

    def __init__(self, members: Members, server: RelayServer) -> None:
        self._members, self._server = members, server

    @contextlib.contextmanager
    def pair(self, config: LinkConfig = CONFIG) -> Iterator[Pair]:
        with joined(self._members, self._server.relay()) as pair:
            yield pair
        self._server.wait_empty()


@pytest.fixture(scope="module")
def shared(members: Members) -> Iterator[RelayServer]:
    with RelayServer(members) as server:
        server.open()
        yield server


@pytest.fixture
def kind(members: Members, shared: RelayServer) -> RelayKind:
    return RelayKind(members, shared)


def test_a_reader_in_the_middle_of_a_frame_learns_at_once_that_the_other_left(
    members: Members, kind: RelayKind
) -> None:
    with kind.pair() as (left, right):
        reading = run(receive, right)
        head = encode_head(Note(1), [10**6], generation=left.generation, max_bytes=CONFIG.max_frame_bytes)
        assert left._channel.try_write([memoryview(head), memoryview(bytes(1000))]) == len(head) + 1000
        time.sleep(0.3)  # it has taken these and waits for the many that are missing
        left.close()
        with pytest.raises(LinkClosed, match="in the middle of a frame"):
            reading.result(DEADLINE_S / 2)


def test_relayed_links_over_ipv6(members: Members) -> None:
    with RelayServer(members, host="::1") as server, joined(members, server.open()) as (left, right):
        left.send(Note(1), [b"six"], deadline_s=DEADLINE_S)
        assert receive(right) == (Note(1), [b"six"])
        assert (left.peer, right.peer) == ("right", "left")


class Tap(asyncio.Protocol):
    """Stands before a guest's protocol and keeps what it is given."""

    def __init__(self, served: asyncio.Protocol, seen: bytearray) -> None:
        self._served, self._seen = served, seen
        self.connection_made = served.connection_made  # type: ignore[method-assign]
        self.connection_lost = served.connection_lost  # type: ignore[method-assign]
        self.pause_writing = served.pause_writing  # type: ignore[method-assign]
        self.resume_writing = served.resume_writing  # type: ignore[method-assign]

    def data_received(self, data: bytes) -> None:
        self._seen += data
        self._served.data_received(data)


def test_the_relay_sees_nothing_of_what_is_said(members: Members) -> None:
    seen = bytearray()

    def tap(hub: RelayHub) -> Callable[[], asyncio.Protocol]:
        return lambda: Tap(hub(), seen)

    with RelayServer(members, tap=tap) as server, joined(members, server.open()) as (left, right):
        for sender, receiver in ((left, right), (right, left)):
            sender.send(Note(1, "a secret header"), [b"a secret buffer" * 1000], deadline_s=DEADLINE_S)
            receive(receiver)
    assert len(seen) > 30_000
    assert TOKEN.encode() in seen  # so this is what the relay could read
    for secret in (b"secret", b"RVNF"):
        assert secret not in seen


def test_counts_of_each_pair(members: Members) -> None:
    with RelayServer(members) as server:
        server.open("another-token-long-enough", ("x", "y"))
        with joined(members, server.open()) as (left, right):
            left.send(Note(1), [bytes(100_000)], deadline_s=DEADLINE_S)
            receive(right)
            other, ours = server.in_loop(server.hub.stats)
            assert (ours.names, ours.num_joined, ours.is_joined) == (("left", "right"), 1, True)
            assert 100_000 < ours.carried_bytes[0] < 120_000
            assert ours.carried_bytes[1] < 10_000
            assert (other.carried_bytes, other.is_joined) == ((0, 0), False)


def test_a_wrong_token_is_refused_with_a_sentence(members: Members) -> None:
    with RelayServer(members) as server:
        server.open()
        with pytest.raises(HandshakeError, match="nobody is expected with this token"):
            join(members, server.relay("not-the-token-at-all"), "left", "right")
        with pytest.raises(HandshakeError, match="nobody is expected"):
            join(members, server.relay(), "third", "right")
        assert "wrong" in server.refusals.get(timeout=DEADLINE_S)


def test_whoever_waits_alone_is_told(members: Members) -> None:
    with RelayServer(members, hub=lambda tell: HubConfig(wait_s=0.05, on_refused=tell)) as server:
        with pytest.raises(HandshakeError, match=r"did not come within 0\.05 s"):
            join(members, server.open(), "left", "right")
        assert "did not come" in server.refusals.get(timeout=DEADLINE_S)
    with RelayServer(members) as server, pytest.raises(LinkTimeout):
        join(members, server.open(), "left", "right", deadline_s=0.1)


def test_a_member_cannot_stand_in_for_the_relay_or_for_the_peer(members: Members) -> None:
    with RelayServer(members) as server:
        relay = server.open()
        other = RelayInfo(address=relay.address, token=TOKEN, name="another")
        with pytest.raises(HandshakeError, match="is coordinator, not the relay another"):
            join(members, other, "left", "right")

        # The impostor knows the token and says that it is right; its certificate says otherwise.
        impostor = replace(members["impostor"], name="right")
        pretending = run(dial_relay, relay, impostor, CONFIG, peer="left", deadline_s=DEADLINE_S)
        with pytest.raises(HandshakeError, match="impostor is not allowed"):
            join(members, relay, "left", "right")
        with pytest.raises(HandshakeError, match="left does not accept"):
            pretending.result(DEADLINE_S)


def test_the_newer_connection_of_an_end_counts(members: Members) -> None:
    with RelayServer(members) as server:
        relay = server.open()
        with pytest.raises(LinkTimeout):  # this one's connection is closed, but the relay may not know it yet
            join(members, relay, "left", "right", deadline_s=0.1)
        for _ in range(3):
            with joined(members, relay) as (left, right), joined(members, relay) as (newer, newest):
                for old in (left, right):
                    with pytest.raises(LinkClosed):
                        receive(old)
                newer.send(Note(1), deadline_s=DEADLINE_S)
                assert receive(newest) == (Note(1), [])


def test_a_relay_that_dies_in_the_middle_of_a_frame_ends_both(members: Members) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RelayServer(members))
        left, right = stack.enter_context(joined(members, server.open()))
        placing = threading.Event()

        def place(header: object, lengths: tuple[int, ...]) -> list[memoryview]:
            placing.set()
            return [memoryview(bytearray(length)) for length in lengths]

        sending = run(left.send, Note(1), [bytes(300 * 2**20)], deadline_s=DEADLINE_S)
        receiving = run(lambda: right.receive(place, deadline_s=DEADLINE_S))
        assert placing.wait(DEADLINE_S)
        server.in_loop(server.front.close)
        with pytest.raises(LinkClosed):
            sending.result(DEADLINE_S)
        with pytest.raises(LinkClosed):
            receiving.result(DEADLINE_S)


def test_a_pair_that_is_closed_or_idle_is_let_go(members: Members) -> None:
    with RelayServer(members) as server, joined(members, server.open()) as (left, right):
        server.in_loop(lambda: server.hub.close(TOKEN))
        for link in (left, right):
            with pytest.raises(LinkClosed):
                receive(link)
        assert server.in_loop(server.hub.stats) == []
    idle = RelayServer(members, hub=lambda tell: HubConfig(idle_s=0.1, on_refused=tell))
    with idle as server, joined(members, server.open()) as (left, right):
        for link in (left, right):
            with pytest.raises(LinkClosed):
                receive(link)


def test_a_slow_reader_costs_the_relay_little_memory(members: Members) -> None:
    with RelayServer(members) as server, joined(members, server.open()) as (left, right):
        with pytest.raises(LinkTimeout):
            left.send(Note(1), [bytes(200 * 2**20)], deadline_s=0.5)
        assert 0 < server.in_loop(server.hub.waiting_bytes) < 2 * 2**20
        with pytest.raises(LinkClosed):
            receive(right)


def test_as_many_pairs_as_allowed(members: Members) -> None:
    with RelayServer(members, hub=lambda tell: HubConfig(max_pairs=1, on_refused=tell)) as server:
        relay = server.open()
        more = server.open("a-second-token-long-enough", ("left", "third"))
        with joined(members, relay), pytest.raises(HandshakeError, match="carries 1 pairs already"):
            join(members, more, "left", "third")
        coming = run(until_let_in, lambda: join(members, more, "third", "left"))
        with until_let_in(lambda: join(members, more, "left", "third")), coming.result(DEADLINE_S):
            pass


def until_let_in(dial: Callable[[], StreamLink]) -> StreamLink:
    """The pair before may still be leaving."""
    while True:
        with contextlib.suppress(HandshakeError):
            return dial()


def client(members: Members, server: RelayServer, *protocols: str, source: str = "127.0.0.1") -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(members["left"].authority_path))
    context.check_hostname = False
    if protocols:
        context.set_alpn_protocols(list(protocols))
    plain = socket.create_connection(server.address, timeout=DEADLINE_S, source_address=(source, 0))
    return context.wrap_socket(plain)


def read_all(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_others_on_the_port_get_the_page(members: Members) -> None:
    with RelayServer(members) as server:
        for protocols in ((), ("http/1.1",), ("h2", "http/1.1")):
            with client(members, server, *protocols) as browser:
                browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert read_all(browser) == PAGE


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "do not begin a hello"),
        (b"RVNR\xff\xff" + bytes(100), "over the limit"),
        (b"RVNR\x00\x03abc", "cannot be read"),
        (b"RVNR\x00\x01\x80", "cannot be read"),
        (encode_note(Join(TOKEN, "left")) + b"more", "spoke before"),
        (encode_note(Join("", "")), "nobody is expected"),
        (encode_note(Join(TOKEN, "left"))[:9], "did not say hello"),
        (b"R", "did not say hello"),
    ],
)
def test_garbage_is_refused(members: Members, words: bytes, sentence: str) -> None:
    with RelayServer(members, hub=lambda tell: HubConfig(hello_s=0.1, on_refused=tell)) as server:
        server.open()
        with client(members, server, "ravnest-relay") as guest:
            guest.sendall(words)
            assert b"refused" in read_all(guest)
        assert sentence in server.refusals.get(timeout=DEADLINE_S)


def test_a_hello_in_crumbs_is_understood(members: Members) -> None:
    with RelayServer(members) as server, client(members, server, "ravnest-relay") as guest:
        for byte in encode_note(Observe()):
            guest.sendall(bytes([byte]))
        answer = msgspec.msgpack.decode(guest.recv(1000)[6:])
        assert answer == {"type": "seen", "host": "127.0.0.1", "port": guest.getsockname()[1]}


def test_who_is_silent_or_speaks_no_tls_is_sent_away(members: Members) -> None:
    limits = RelayServer(members, front=lambda tell: FrontConfig(handshake_s=0.1, first_word_s=0.1, on_refused=tell))
    with limits as server:
        with socket.create_connection(server.address, timeout=DEADLINE_S) as silent:
            assert read_all(silent) == b""
        assert "handshake" in server.refusals.get(timeout=DEADLINE_S)
        with socket.create_connection(server.address, timeout=DEADLINE_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            read_all(plain)
        assert "handshake" in server.refusals.get(timeout=DEADLINE_S)
        with client(members, server) as speechless:
            assert read_all(speechless) == b""
        assert "said nothing" in server.refusals.get(timeout=DEADLINE_S)
        assert server.in_loop(lambda: server.front.num_connections) == 0


def test_a_strangers_certificate_is_refused_at_the_port(members: Members, tmp_path: Path) -> None:
    stranger = Members(tmp_path)["left"]
    with RelayServer(members) as server:
        with pytest.raises(HandshakeError):  # it does not know this relay's authority
            dial_relay(server.open(), stranger, CONFIG, peer="right", deadline_s=DEADLINE_S)
        assert "handshake" in server.refusals.get(timeout=DEADLINE_S)
        stranger.authority_path.write_bytes(members.authority.certificate_pem)
        with pytest.raises((HandshakeError, LinkClosed)):  # and this relay not its
            dial_relay(server.relay(), stranger, CONFIG, peer="right", deadline_s=DEADLINE_S)
        assert "handshake" in server.refusals.get(timeout=DEADLINE_S)


def test_a_thousand_connections_that_never_finish_keep_nobody_out(members: Members) -> None:
    limits = FrontConfig(max_per_address=300, max_handshakes=50, handshake_s=60)
    with RelayServer(members, front=lambda tell: limits) as server, contextlib.ExitStack() as stack:
        server.open()
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for i in range(1000):
            stack.enter_context(socket.create_connection(server.address, source_address=(f"127.0.1.{i % 4}", 0)))
        assert server.in_loop(lambda: server.front.num_handshakes) <= 50
        assert tracemalloc.get_traced_memory()[1] < 50e6  # a handshake has a buffer of 256 kB: all would have 256 MB
        with joined(members, server.relay()) as (left, right):
            left.send(Note(1), deadline_s=DEADLINE_S)
            assert receive(right) == (Note(1), [])
            with client(members, server) as browser:
                browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert read_all(browser) == PAGE
        assert server.in_loop(lambda: server.front.num_connections) <= 52


def test_one_address_cannot_take_all_places(members: Members) -> None:
    limits = RelayServer(members, front=lambda tell: FrontConfig(max_per_address=2, on_refused=tell))
    with limits as server, client(members, server), client(members, server):
        with socket.create_connection(server.address, timeout=DEADLINE_S) as third:
            assert read_all(third) == b""
        assert "2 connections from there" in server.refusals.get(timeout=DEADLINE_S)
        with client(members, server, source="127.0.0.2") as elsewhere:
            elsewhere.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert read_all(elsewhere) == PAGE
    full = RelayServer(members, front=lambda tell: FrontConfig(max_connections=1, on_refused=tell))
    with full as server, client(members, server):
        with socket.create_connection(server.address, timeout=DEADLINE_S) as second:
            assert read_all(second) == b""
        assert "1 connections already" in server.refusals.get(timeout=DEADLINE_S)


def test_throughput_is_not_absurd(members: Members, shared: RelayServer) -> None:
    data = random.Random(1).randbytes(10**6) * 32
    memory = bytearray(len(data))
    with joined(members, shared.relay()) as (left, right):
        began_s = time.monotonic()
        sending = run(left.send, Note(1), [data], deadline_s=DEADLINE_S)
        right.receive(lambda header, lengths: [memoryview(memory)], deadline_s=DEADLINE_S)
        sending.result(DEADLINE_S)
        took_s = time.monotonic() - began_s
    assert memory == data
    assert len(data) / took_s > 10e6  # a home line of 80 Mbit/s


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"max_pairs": 0}, {"max_guests": 1}, {"hello_s": 0}, {"waiting_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HubConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_handshakes"):
        FrontConfig(max_handshakes=0)
    hub = RelayHub()
    for token, names in (("short", ("a", "b")), (TOKEN, ("a", "a")), (TOKEN, ("a", "B!"))):
        with pytest.raises(ValueError, match=r"token|two nodes|valid name"):
            hub.open(token, names)
    hub.open(TOKEN, ("a", "b"))
    with pytest.raises(ValueError, match="in use"):
        hub.open(TOKEN, ("a", "c"))
