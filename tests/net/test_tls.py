"""TLS links: who gets in, who does not, and what somebody on the wire sees."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ravnest.core.errors import FrameError, HandshakeError, LinkClosed, LinkError, LinkTimeout
from ravnest.net.identity import Authority, Identity, make_key, make_request, save_identity
from ravnest.net.listen import ListenConfig, Listener
from ravnest.net.stream import StreamLink
from ravnest.net.tls import dial_tls, listen_tls, secure
from tests.net.kinds import CONFIG, DEADLINE_S, YEAR, Kind, Members, Note, TlsKind, receive, run

pytestmark = pytest.mark.timeout(60)

LOCAL = ("127.0.0.1", 0)
Refusals = queue.Queue[LinkError]


def anybody(name: str) -> bool:
    return True


@contextlib.contextmanager
def listening(
    members: Members,
    allowed: Callable[[str], bool] = anybody,
    *,
    greeting_s: float = 30.0,
    max_greetings: int = 64,
) -> Iterator[tuple[Listener, Refusals]]:
    refusals: Refusals = queue.Queue()
    config = ListenConfig(
        greeting_s=greeting_s, max_greetings=max_greetings, on_refused=lambda _, reason: refusals.put(reason)
    )
    with listen_tls(LOCAL, members["right"], CONFIG, allowed=allowed, listening=config) as listener:
        yield listener, refusals


def dial(listener: Listener, identity: Identity, allowed: Callable[[str], bool] = anybody) -> StreamLink:
    return dial_tls(listener.address, identity, CONFIG, allowed=allowed, deadline_s=DEADLINE_S)


def check_still_open(listener: Listener, accepting: Future[StreamLink], members: Members) -> None:
    """After a refusal, a member gets in through the very same `accept`."""
    with dial(listener, members["left"]) as near, accepting.result(DEADLINE_S) as far:
        near.send(Note(1), deadline_s=DEADLINE_S)
        assert receive(far) == (Note(1), [])


def test_each_knows_the_other_by_its_certificate(kind: Kind, members: Members) -> None:
    with TlsKind(members).pair() as (left, right):
        assert (left.peer, right.peer) == ("right", "left")
    with kind.pair() as (left, right):
        assert left.peer
        assert right.peer


def test_a_stranger_is_refused_on_both_sides(members: Members, tmp_path: Path) -> None:
    strangers = Members(tmp_path, run_name="run")  # the same name proves nothing
    with listening(members) as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with pytest.raises(HandshakeError):
            dial(listener, strangers["left"])
        assert isinstance(refusals.get(timeout=DEADLINE_S), HandshakeError)
        check_still_open(listener, accepting, members)


def test_a_certificate_of_another_authority_is_not_accepted_by_the_listener(members: Members, tmp_path: Path) -> None:
    """The dialler trusts the listener, so that only the listener can refuse."""
    stranger = Members(tmp_path)["left"]
    stranger.authority_path.write_bytes(members.authority.certificate_pem)
    with listening(members) as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with pytest.raises(HandshakeError):
            dial(listener, stranger)
        assert "authenticated" in str(refusals.get(timeout=DEADLINE_S))
        check_still_open(listener, accepting, members)


def test_a_member_cannot_vouch_for_others(members: Members, tmp_path: Path) -> None:
    member = members["left"]
    certificate = x509.load_pem_x509_certificate(member.certificate_path.read_bytes())
    member_key = serialization.load_pem_private_key(member.key_path.read_bytes(), password=None)
    assert isinstance(member_key, ec.EllipticCurvePrivateKey)
    key, impostor = make_key(), Authority(member_key, certificate)
    forged = impostor.sign(make_request(key, "friend"), "friend", now=datetime.now(UTC), valid=YEAR)
    chain = forged + member.certificate_path.read_bytes()
    friend = save_identity(tmp_path / "friend", key, chain, members.authority.certificate_pem)
    with listening(members) as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with pytest.raises(HandshakeError):
            dial(listener, friend)
        assert "invalid CA certificate" in str(refusals.get(timeout=DEADLINE_S))
        check_still_open(listener, accepting, members)


def tls_client(members: Members, **versions: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(members["left"].authority_path)
    for name, version in versions.items():
        setattr(context, name, version)
    return context


def test_no_certificate_is_refused(members: Members) -> None:
    with listening(members) as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        plain = socket.create_connection(listener.address, timeout=DEADLINE_S)
        with (
            tls_client(members).wrap_socket(plain) as client,
            pytest.raises(OSError, match=r"required|reset"),
        ):
            client.recv(1)
        assert "did not return a certificate" in str(refusals.get(timeout=DEADLINE_S)).lower().replace("_", " ")
        check_still_open(listener, accepting, members)


def test_an_older_tls_is_refused(members: Members) -> None:
    with listening(members) as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        context = tls_client(members, maximum_version=ssl.TLSVersion.TLSv1_2)
        context.load_cert_chain(members["left"].certificate_path, members["left"].key_path)
        plain = socket.create_connection(listener.address, timeout=DEADLINE_S)
        with plain, pytest.raises(ssl.SSLError):
            context.wrap_socket(plain)
        assert "protocol" in str(refusals.get(timeout=DEADLINE_S)).lower()
        check_still_open(listener, accepting, members)


def test_what_is_not_tls_is_refused(members: Members) -> None:
    with listening(members) as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with socket.create_connection(listener.address, timeout=DEADLINE_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert "authenticated" in str(refusals.get(timeout=DEADLINE_S))
        with socket.create_connection(listener.address, timeout=DEADLINE_S):
            pass
        assert "left" in str(refusals.get(timeout=DEADLINE_S))
        check_still_open(listener, accepting, members)


def test_a_name_that_the_listener_does_not_allow_is_refused(members: Members) -> None:
    with listening(members, lambda name: name == "left") as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with pytest.raises(HandshakeError, match="right does not accept"):
            dial(listener, members["uninvited"])
        assert "uninvited is not allowed" in str(refusals.get(timeout=DEADLINE_S))
        check_still_open(listener, accepting, members)


def test_a_name_that_the_dialler_does_not_allow_is_refused(members: Members) -> None:
    with listening(members) as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with pytest.raises(HandshakeError, match="right is not allowed"):
            dial(listener, members["left"], lambda name: name == "somebody-else")
        assert "left does not accept" in str(refusals.get(timeout=DEADLINE_S))
        check_still_open(listener, accepting, members)


def test_clocks_a_day_apart_are_fine_and_an_expired_certificate_is_not(members: Members) -> None:
    now = datetime.now(UTC)
    ahead = members.make("ahead", now=now + timedelta(days=1))
    expired = members.make("expired", now=now - timedelta(days=9), valid=timedelta(days=8))
    with listening(members) as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with pytest.raises(HandshakeError):
            dial(listener, expired)
        assert "expired" in str(refusals.get(timeout=DEADLINE_S))
        with dial(listener, ahead), accepting.result(DEADLINE_S) as far:
            assert far.peer == "ahead"


def test_the_silent_keep_nobody_waiting(members: Members) -> None:
    with listening(members) as (listener, _), contextlib.ExitStack() as silent:
        for _ in range(3):
            silent.enter_context(socket.create_connection(listener.address))
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        check_still_open(listener, accepting, members)


def test_the_silent_are_sent_away_at_their_deadline(members: Members) -> None:
    with listening(members, greeting_s=0.05) as (listener, refusals):
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with socket.create_connection(listener.address, timeout=DEADLINE_S) as silent:
            assert "within 0.05 s" in str(refusals.get(timeout=DEADLINE_S))
            assert silent.recv(1) == b""
        listener.close()
        with pytest.raises(LinkClosed):
            accepting.result(DEADLINE_S)


def test_of_too_many_the_slowest_is_sent_away(members: Members) -> None:
    with listening(members, max_greetings=2) as (listener, refusals), contextlib.ExitStack() as silent:
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        first = silent.enter_context(socket.create_connection(listener.address, timeout=DEADLINE_S))
        for _ in range(2):
            silent.enter_context(socket.create_connection(listener.address, timeout=DEADLINE_S))
        assert "too many" in str(refusals.get(timeout=DEADLINE_S))
        assert first.recv(1) == b""
        check_still_open(listener, accepting, members)


def test_a_listener_that_says_nothing_is_given_up(members: Members) -> None:
    with socket.create_server(LOCAL) as silent, pytest.raises(LinkTimeout, match="introduce itself"):
        dial_tls(silent.getsockname(), members["left"], CONFIG, allowed=anybody, deadline_s=0.05)


def test_nobody_there(members: Members) -> None:
    with socket.create_server(LOCAL) as gone:
        address = gone.getsockname()
    with pytest.raises(LinkClosed, match="cannot reach"):
        dial_tls(address, members["left"], CONFIG, allowed=anybody, deadline_s=DEADLINE_S)
    with socket.create_server(LOCAL) as taken, pytest.raises(LinkError, match="cannot listen"):
        listen_tls(taken.getsockname(), members["left"], CONFIG, allowed=anybody)


class Wire:
    """A man in the middle: passes on what goes by, remembers it, and may change it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.seen = bytearray()
        self.tamper = threading.Event()
        self._target = target
        self._listening = socket.create_server(LOCAL)
        self.address = self._listening.getsockname()
        self._working = run(self._work)

    def _work(self) -> None:
        with self._listening.accept()[0] as near, socket.create_connection(self._target) as far:
            back = run(self._copy, far, near)
            self._copy(near, far)
            back.result(DEADLINE_S)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                self.seen += data
                if self.tamper.is_set():
                    data[len(data) // 2] ^= 1
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listening.close()
        self._working.result(DEADLINE_S)


@contextlib.contextmanager
def tapped(members: Members) -> Iterator[tuple[StreamLink, StreamLink, Wire]]:
    with listening(members) as (listener, _), Wire(listener.address) as wire:
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        near = dial_tls(wire.address, members["left"], CONFIG, allowed=anybody, deadline_s=DEADLINE_S)
        with near, accepting.result(DEADLINE_S) as far:
            yield near, far, wire


def test_the_wire_shows_nothing_of_what_is_said(members: Members) -> None:
    with tapped(members) as (near, far, wire):
        for sender, receiver in ((near, far), (far, near)):
            sender.send(Note(1, "a secret header"), [b"a secret buffer" * 1000], deadline_s=DEADLINE_S)
            assert receive(receiver) == (Note(1, "a secret header"), [b"a secret buffer" * 1000])
        near.close()
    assert len(wire.seen) > 30_000
    for secret in (b"secret", b"RVNF", b"left", b"right"):  # names travel in certificates, encrypted too
        assert secret not in wire.seen


def test_what_was_changed_on_the_wire_is_refused(members: Members) -> None:
    with tapped(members) as (near, far, wire):
        near.send(Note(1), [b"as it was"], deadline_s=DEADLINE_S)
        assert receive(far) == (Note(1), [b"as it was"])
        wire.tamper.set()
        near.send(Note(2), [b"as it was not"], deadline_s=DEADLINE_S)
        with pytest.raises(FrameError, match="not from the peer"):
            receive(far)
        assert far.closed
        near.close()


def test_a_connection_made_elsewhere_can_be_secured(members: Members) -> None:
    with socket.create_server(LOCAL) as server:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    serving = run(secure, accepted, members["right"], CONFIG, allowed=anybody, server_side=True, deadline_s=DEADLINE_S)
    near = secure(dialled, members["left"], CONFIG, allowed=anybody, server_side=False, deadline_s=DEADLINE_S)
    with near, serving.result(DEADLINE_S) as far:
        near.send(Note(1), deadline_s=DEADLINE_S)
        assert receive(far) == (Note(1), [])
        assert (near.peer, far.peer) == ("right", "left")
