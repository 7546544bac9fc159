"""The relay: joined pairs, and malicious, slow or silent clients."""

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

from ravnest.coordinator.http.alpn_server import AlpnServerConfig
from ravnest.core.clock import Deadline
from ravnest.errors import HandshakeError, LinkClosed, LinkTimeout
from ravnest.protocol.relay import ObserveAddress, RelayJoin, encode_message
from ravnest.transport.frame import encode_head
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import is_controlling
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.relay_client import RelayInfo, open_tunnel, relay_context
from ravnest.transport.p2p.relay_server import RelayServer, RelayServerConfig
from ravnest.transport.socket import run_blocking
from ravnest.transport.stream import StreamLink
from ravnest.transport.tls import connect_tcp, tls_context
from tests.unit.transport import test_links
from tests.unit.transport.kinds import CONFIG, DEADLINE_S, Members, Note, Pair, receive, run
from tests.unit.transport.relay_fixture import PAGE, TOKEN, RelayFixture

for _name, _test in list(vars(test_links).items()):  # the conformance suite runs on relayed links too
    if _name.startswith("test_"):
        globals()[_name] = _test


def dial_relay(relay: RelayInfo, identity: Identity, *, peer: str, deadline_s: float) -> StreamLink:
    deadline = Deadline(deadline_s)
    inner = tls_context(identity, server_side=not is_controlling(identity.name, peer))
    sock = connect_tcp(relay.address, deadline)
    tunnel = open_tunnel(sock, relay, identity.name, peer, (relay_context(identity), inner))
    return StreamLink(run_blocking(tunnel, sock, deadline), CONFIG, peer=peer)


def join(members: Members, relay: RelayInfo, me: str, peer: str, deadline_s: float = DEADLINE_S) -> StreamLink:
    return dial_relay(relay, members[me], peer=peer, deadline_s=deadline_s)


@contextlib.contextmanager
def joined(members: Members, relay: RelayInfo) -> Iterator[Pair]:
    joining = run(join, members, relay, "right", "left")
    with join(members, relay, "left", "right") as left, joining.result(DEADLINE_S) as right:
        yield left, right


class RelayKind:
    """Links through a relay, for the conformance suite."""

    name = "relay"
    big_bytes = 16 * 10**6
    in_flight_bytes = 2 * 64 * 2**20

    def __init__(self, members: Members, server: RelayFixture) -> None:
        self._members, self._server = members, server

    @contextlib.contextmanager
    def pair(self, config: LinkConfig = CONFIG) -> Iterator[Pair]:
        with joined(self._members, self._server.info()) as pair:
            yield pair
        self._server.wait_empty()


@pytest.fixture(scope="module")
def shared(members: Members) -> Iterator[RelayFixture]:
    with RelayFixture(members) as server:
        server.open()
        yield server


@pytest.fixture
def kind(members: Members, shared: RelayFixture) -> RelayKind:
    return RelayKind(members, shared)


def test_a_disconnect_in_the_middle_of_a_frame_is_detected_at_once(members: Members, kind: RelayKind) -> None:
    with kind.pair() as (left, right):
        reading = run(receive, right)
        head = encode_head(Note(1), [10**6], generation=left.generation, max_bytes=CONFIG.max_frame_bytes)
        assert left._channel.try_write([memoryview(head), memoryview(bytes(1000))]) == len(head) + 1000
        time.sleep(0.3)  # it has read these and waits for the rest
        left.close()
        with pytest.raises(LinkClosed, match="in the middle of a frame"):
            reading.result(DEADLINE_S / 2)


def test_relayed_links_over_ipv6(members: Members) -> None:
    with RelayFixture(members, host="::1") as server, joined(members, server.open()) as (left, right):
        left.send(Note(1), [b"six"], deadline_s=DEADLINE_S)
        assert receive(right) == (Note(1), [b"six"])
        assert (left.peer, right.peer) == ("right", "left")


class Tap(asyncio.Protocol):
    """Wraps a client's protocol and records the received bytes."""

    def __init__(self, served: asyncio.Protocol, seen: bytearray) -> None:
        self._served, self._seen = served, seen
        self.connection_made = served.connection_made  # type: ignore[method-assign]
        self.connection_lost = served.connection_lost  # type: ignore[method-assign]
        self.pause_writing = served.pause_writing  # type: ignore[method-assign]
        self.resume_writing = served.resume_writing  # type: ignore[method-assign]

    def data_received(self, data: bytes) -> None:
        self._seen += data
        self._served.data_received(data)


def test_the_relay_sees_only_encrypted_bytes(members: Members) -> None:
    seen = bytearray()

    def tap(relay: RelayServer) -> Callable[[], asyncio.Protocol]:
        return lambda: Tap(relay(), seen)

    with RelayFixture(members, tap=tap) as server, joined(members, server.open()) as (left, right):
        for sender, receiver in ((left, right), (right, left)):
            sender.send(Note(1, "a secret header"), [b"a secret buffer" * 1000], deadline_s=DEADLINE_S)
            receive(receiver)
    assert len(seen) > 30_000
    assert TOKEN.encode() in seen  # the relay's own layer is decrypted
    for secret in (b"secret", b"RVNF"):
        assert secret not in seen


def test_stats_of_each_pair(members: Members) -> None:
    with RelayFixture(members) as server:
        server.open("another-token-long-enough", ("x", "y"))
        with joined(members, server.open()) as (left, right):
            left.send(Note(1), [bytes(100_000)], deadline_s=DEADLINE_S)
            receive(right)
            other, ours = server.in_loop(server.server.stats)
            assert (ours.names, ours.num_joined, ours.is_joined) == (("left", "right"), 1, True)
            assert 100_000 < ours.carried_bytes[0] < 120_000
            assert ours.carried_bytes[1] < 10_000
            assert (other.carried_bytes, other.is_joined) == ((0, 0), False)


def test_a_wrong_token_is_rejected(members: Members) -> None:
    with RelayFixture(members) as server:
        server.open()
        with pytest.raises(HandshakeError, match="unknown token"):
            join(members, server.info("not-the-token-at-all"), "left", "right")
        with pytest.raises(HandshakeError, match="unknown token"):
            join(members, server.info(), "third", "right")
        assert "wrong" in server.rejections.get(timeout=DEADLINE_S)


def test_a_client_without_a_partner_is_rejected(members: Members) -> None:
    with RelayFixture(
        members, relay=lambda report: RelayServerConfig(partner_timeout_s=0.05, on_rejected=report)
    ) as server:
        with pytest.raises(HandshakeError, match=r"did not join within 0\.05 s"):
            join(members, server.open(), "left", "right")
        assert "did not join" in server.rejections.get(timeout=DEADLINE_S)
    with RelayFixture(members) as server, pytest.raises(LinkTimeout):
        join(members, server.open(), "left", "right", deadline_s=0.1)


def test_a_member_cannot_impersonate_the_relay_or_the_peer(members: Members) -> None:
    with RelayFixture(members) as server:
        relay = server.open()
        other = RelayInfo(address=relay.address, token=TOKEN, name="another")
        with pytest.raises(HandshakeError, match=r"expected relay another at .*, found coordinator"):
            join(members, other, "left", "right")

        # The impostor has the token and claims to be "right"; its certificate has another name.
        impostor = replace(members["impostor"], name="right")
        impersonating = run(dial_relay, relay, impostor, peer="left", deadline_s=DEADLINE_S)
        with pytest.raises(HandshakeError, match="impostor is not allowed"):
            join(members, relay, "left", "right")
        with pytest.raises(HandshakeError, match="left rejected"):
            impersonating.result(DEADLINE_S)


def test_the_newer_connection_of_a_node_counts(members: Members) -> None:
    with RelayFixture(members) as server:
        relay = server.open()
        with pytest.raises(LinkTimeout):  # closed at this end, but perhaps not at the relay yet
            join(members, relay, "left", "right", deadline_s=0.1)
        for _ in range(3):
            with joined(members, relay) as (left, right), joined(members, relay) as (newer, newest):
                for old in (left, right):
                    with pytest.raises(LinkClosed):
                        receive(old)
                newer.send(Note(1), deadline_s=DEADLINE_S)
                assert receive(newest) == (Note(1), [])


def test_a_relay_that_dies_in_the_middle_of_a_frame_closes_both_links(members: Members) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RelayFixture(members))
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


def test_a_closed_or_idle_pair_is_disconnected(members: Members) -> None:
    with RelayFixture(members) as server, joined(members, server.open()) as (left, right):
        server.in_loop(lambda: server.server.close(TOKEN))
        for link in (left, right):
            with pytest.raises(LinkClosed):
                receive(link)
        assert server.in_loop(server.server.stats) == []
    idle = RelayFixture(members, relay=lambda report: RelayServerConfig(idle_timeout_s=0.1, on_rejected=report))
    with idle as server, joined(members, server.open()) as (left, right):
        for link in (left, right):
            with pytest.raises(LinkClosed):
                receive(link)


def buffered_bytes(relay: RelayServer) -> int:
    return sum(client.transport.get_write_buffer_size() for client in relay.clients)


def test_a_slow_reader_costs_the_relay_little_memory(members: Members) -> None:
    with RelayFixture(members) as server, joined(members, server.open()) as (left, right):
        with pytest.raises(LinkTimeout):
            left.send(Note(1), [bytes(200 * 2**20)], deadline_s=0.5)
        assert 0 < server.in_loop(lambda: buffered_bytes(server.server)) < 2 * 2**20
        with pytest.raises(LinkClosed):
            receive(right)


def test_the_number_of_pairs_is_limited(members: Members) -> None:
    with RelayFixture(members, relay=lambda report: RelayServerConfig(max_pairs=1, on_rejected=report)) as server:
        relay = server.open()
        more = server.open("a-second-token-long-enough", ("left", "third"))
        with joined(members, relay), pytest.raises(HandshakeError, match="1 pairs are connected"):
            join(members, more, "left", "third")
        joining = run(until_accepted, lambda: join(members, more, "third", "left"))
        with until_accepted(lambda: join(members, more, "left", "third")), joining.result(DEADLINE_S):
            pass


def until_accepted(dial: Callable[[], StreamLink]) -> StreamLink:
    """Retry: the previous pair may still be disconnecting."""
    while True:
        with contextlib.suppress(HandshakeError):
            return dial()


def client(members: Members, server: RelayFixture, *protocols: str, source: str = "127.0.0.1") -> ssl.SSLSocket:
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


def test_http_clients_get_the_page(members: Members) -> None:
    with RelayFixture(members) as server:
        for protocols in ((), ("http/1.1",), ("h2", "http/1.1")):
            with client(members, server, *protocols) as browser:
                browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert read_all(browser) == PAGE


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "do not begin a relay message"),
        (b"RVNR\xff\xff" + bytes(100), "over the limit"),
        (b"RVNR\x00\x03abc", "malformed relay request"),
        (b"RVNR\x00\x01\x80", "malformed relay request"),
        (encode_message(RelayJoin(TOKEN, "left")) + b"more", "before the other end joined"),
        (encode_message(RelayJoin("", "")), "unknown token"),
        (encode_message(RelayJoin(TOKEN, "left"))[:9], "no request within"),
        (b"R", "no request within"),
    ],
)
def test_garbage_is_rejected(members: Members, data: bytes, message: str) -> None:
    with RelayFixture(
        members, relay=lambda report: RelayServerConfig(request_timeout_s=0.1, on_rejected=report)
    ) as server:
        server.open()
        with client(members, server, "ravnest-relay") as sock:
            sock.sendall(data)
            assert b"rejected" in read_all(sock)
        assert message in server.rejections.get(timeout=DEADLINE_S)


def test_a_request_may_arrive_byte_by_byte(members: Members) -> None:
    with RelayFixture(members) as server, client(members, server, "ravnest-relay") as sock:
        for byte in encode_message(ObserveAddress()):
            sock.sendall(bytes([byte]))
        answer = msgspec.msgpack.decode(sock.recv(1000)[6:])
        assert answer == {"type": "observed", "host": "127.0.0.1", "port": sock.getsockname()[1]}


def test_silent_and_plain_text_clients_are_disconnected(members: Members) -> None:
    limits = RelayFixture(
        members, front=lambda report: AlpnServerConfig(handshake_s=0.5, first_byte_s=0.5, on_rejected=report)
    )
    with limits as server:
        with socket.create_connection(server.address, timeout=DEADLINE_S) as silent:
            assert read_all(silent) == b""
        assert "handshake" in server.rejections.get(timeout=DEADLINE_S)
        with socket.create_connection(server.address, timeout=DEADLINE_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            read_all(plain)
        assert "handshake" in server.rejections.get(timeout=DEADLINE_S)
        with client(members, server) as idle:
            assert read_all(idle) == b""
        assert "no data within" in server.rejections.get(timeout=DEADLINE_S)
        assert server.in_loop(lambda: server.front.num_connections) == 0


def test_a_certificate_of_another_authority_is_rejected(members: Members, tmp_path: Path) -> None:
    stranger = Members(tmp_path)["left"]
    with RelayFixture(members) as server:
        with pytest.raises(HandshakeError):  # it does not trust the relay's authority
            dial_relay(server.open(), stranger, peer="right", deadline_s=DEADLINE_S)
        assert "handshake" in server.rejections.get(timeout=DEADLINE_S)
        stranger.authority_path.write_bytes(members.authority.certificate_pem)
        with pytest.raises((HandshakeError, LinkClosed)):  # the relay does not trust its authority
            dial_relay(server.info(), stranger, peer="right", deadline_s=DEADLINE_S)
        assert "handshake" in server.rejections.get(timeout=DEADLINE_S)


def test_a_thousand_unfinished_handshakes_do_not_block_others(members: Members) -> None:
    limits = AlpnServerConfig(max_per_address=300, max_handshakes=50, handshake_s=60)
    with RelayFixture(members, front=lambda report: limits) as server, contextlib.ExitStack() as stack:
        server.open()
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for i in range(1000):
            stack.enter_context(socket.create_connection(server.address, source_address=(f"127.0.1.{i % 4}", 0)))
        assert server.in_loop(lambda: server.front.num_handshakes) <= 50
        assert tracemalloc.get_traced_memory()[1] < 50e6  # a handshake has a buffer of 256 kB: all would have 256 MB
        with joined(members, server.info()) as (left, right):
            left.send(Note(1), deadline_s=DEADLINE_S)
            assert receive(right) == (Note(1), [])
            with client(members, server) as browser:
                browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert read_all(browser) == PAGE
        assert server.in_loop(lambda: server.front.num_connections) <= 52


def test_connections_per_address_are_limited(members: Members) -> None:
    limits = RelayFixture(members, front=lambda report: AlpnServerConfig(max_per_address=2, on_rejected=report))
    with limits as server, client(members, server), client(members, server):
        with socket.create_connection(server.address, timeout=DEADLINE_S) as third:
            assert read_all(third) == b""
        assert "the limit of 2 connections" in server.rejections.get(timeout=DEADLINE_S)
        with client(members, server, source="127.0.0.2") as elsewhere:
            elsewhere.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert read_all(elsewhere) == PAGE
    full = RelayFixture(members, front=lambda report: AlpnServerConfig(max_connections=1, on_rejected=report))
    with full as server, client(members, server):
        with socket.create_connection(server.address, timeout=DEADLINE_S) as second:
            assert read_all(second) == b""
        assert "limit of 1 connections" in server.rejections.get(timeout=DEADLINE_S)


def test_throughput_is_sufficient_for_a_home_line(members: Members, shared: RelayFixture) -> None:
    data = random.Random(1).randbytes(10**6) * 32
    memory = bytearray(len(data))
    with joined(members, shared.info()) as (left, right):
        sending = run(left.send, Note(1), [data], deadline_s=DEADLINE_S)
        right.receive(lambda header, lengths: [memoryview(memory)], deadline_s=DEADLINE_S)
        sending.result(DEADLINE_S)
    assert memory == data


def test_invalid_config_is_rejected() -> None:
    for wrong in ({"max_pairs": 0}, {"max_clients": 1}, {"request_timeout_s": 0}, {"max_buffered_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RelayServerConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_handshakes"):
        AlpnServerConfig(max_handshakes=0)
    relay = RelayServer()
    for token, names in (("short", ("a", "b")), (TOKEN, ("a", "a")), (TOKEN, ("a", "B!"))):
        with pytest.raises(ValueError, match=r"token|two nodes|valid name"):
            relay.open(token, names)
    relay.open(TOKEN, ("a", "b"))
    with pytest.raises(ValueError, match="in use"):
        relay.open(TOKEN, ("a", "c"))
