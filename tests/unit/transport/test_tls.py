"""TLS links: accepted and rejected peers, and what a man in the middle sees and can change."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ravnest.errors import FrameError, HandshakeError, LinkClosed, LinkTimeout
from ravnest.transport.identity import Authority, Identity, make_key, make_request, save_identity
from ravnest.transport.stream import StreamLink
from tests.unit.transport.kinds import CONFIG, DEADLINE_S, YEAR, Kind, Members, Note, TlsKind, receive, run
from tests.unit.transport.tls_links import TlsListener, allow_all, dial_tls

LOCAL = ("127.0.0.1", 0)


def dial(listener: TlsListener, identity: Identity, allowed: Callable[[str], bool] = allow_all) -> StreamLink:
    return dial_tls(listener.address, identity, CONFIG, allowed, deadline_s=DEADLINE_S)


@contextlib.contextmanager
def rejecting(
    members: Members, message: str | None = None, allowed: Callable[[str], bool] = allow_all
) -> Iterator[TlsListener]:
    """A listener that rejects the first connection with `message`, and then accepts a member."""
    with TlsListener(members["right"], CONFIG, allowed) as listener:
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        yield listener
        with pytest.raises(HandshakeError, match=message):
            accepting.result(DEADLINE_S)
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with dial(listener, members["left"]) as near, accepting.result(DEADLINE_S) as far:
            near.send(Note(1), deadline_s=DEADLINE_S)
            assert receive(far) == (Note(1), [])


def test_peers_are_named_by_their_certificates(kind: Kind, members: Members) -> None:
    with TlsKind(members).pair() as (left, right):
        assert (left.peer, right.peer) == ("right", "left")
    with kind.pair() as (left, right):
        assert left.peer
        assert right.peer


def test_a_stranger_is_rejected_on_both_sides(members: Members, tmp_path: Path) -> None:
    strangers = Members(tmp_path, run_name="run")  # the same name proves nothing
    with rejecting(members) as listener, pytest.raises(HandshakeError):
        dial(listener, strangers["left"])


def test_a_certificate_of_another_authority_is_rejected_by_the_listener(members: Members, tmp_path: Path) -> None:
    """The dialer trusts the listener, so that only the listener can reject."""
    stranger = Members(tmp_path)["left"]
    stranger.authority_path.write_bytes(members.authority.certificate_pem)
    with rejecting(members, "authenticated") as listener, pytest.raises(HandshakeError):
        dial(listener, stranger)


def test_a_member_cannot_sign_certificates(members: Members, tmp_path: Path) -> None:
    member = members["left"]
    certificate = x509.load_pem_x509_certificate(member.certificate_path.read_bytes())
    member_key = serialization.load_pem_private_key(member.key_path.read_bytes(), password=None)
    assert isinstance(member_key, ec.EllipticCurvePrivateKey)
    key, impostor = make_key(), Authority(member_key, certificate)
    forged = impostor.sign(make_request(key, "friend"), "friend", now=datetime.now(UTC), valid=YEAR)
    chain = forged + member.certificate_path.read_bytes()
    friend = save_identity(tmp_path / "friend", key, chain, members.authority.certificate_pem)
    with rejecting(members, "invalid CA certificate") as listener, pytest.raises(HandshakeError):
        dial(listener, friend)


def tls_client(members: Members, **versions: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(members["left"].authority_path)
    for name, version in versions.items():
        setattr(context, name, version)
    return context


def test_a_missing_certificate_is_rejected(members: Members) -> None:
    with rejecting(members, r"(?i)did.not.return.a.certificate") as listener:
        plain = socket.create_connection(listener.address, timeout=DEADLINE_S)
        with (
            tls_client(members).wrap_socket(plain) as client,
            pytest.raises(OSError, match=r"required|reset"),
        ):
            client.recv(1)


def test_an_older_tls_is_rejected(members: Members) -> None:
    with rejecting(members, r"(?i)protocol") as listener:
        context = tls_client(members, maximum_version=ssl.TLSVersion.TLSv1_2)
        context.load_cert_chain(members["left"].certificate_path, members["left"].key_path)
        plain = socket.create_connection(listener.address, timeout=DEADLINE_S)
        with plain, pytest.raises(ssl.SSLError):
            context.wrap_socket(plain)


@pytest.mark.parametrize(
    ("data", "message"), [(b"GET / HTTP/1.1\r\n\r\n", "authenticated"), (b"", "closed the connection")]
)
def test_other_protocols_are_rejected(members: Members, data: bytes, message: str) -> None:
    with (
        rejecting(members, message) as listener,
        socket.create_connection(listener.address, timeout=DEADLINE_S) as plain,
    ):
        plain.sendall(data)
        plain.shutdown(socket.SHUT_WR)


def test_a_name_that_the_listener_does_not_allow_is_rejected(members: Members) -> None:
    with (
        rejecting(members, "uninvited is not allowed", lambda name: name == "left") as listener,
        pytest.raises(HandshakeError, match="right rejected"),
    ):
        dial(listener, members["uninvited"])


def test_a_name_that_the_dialer_does_not_allow_is_rejected(members: Members) -> None:
    with (
        rejecting(members, "left rejected") as listener,
        pytest.raises(HandshakeError, match="right is not allowed"),
    ):
        dial(listener, members["left"], lambda name: name == "somebody-else")


def test_clocks_may_differ_by_a_day(members: Members) -> None:
    ahead = members.make("ahead", now=datetime.now(UTC) + timedelta(days=1))
    with TlsListener(members["right"], CONFIG) as listener:
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        with dial(listener, ahead), accepting.result(DEADLINE_S) as far:
            assert far.peer == "ahead"


def test_an_expired_certificate_is_rejected(members: Members) -> None:
    expired = members.make("expired", now=datetime.now(UTC) - timedelta(days=9), valid=timedelta(days=8))
    with rejecting(members, "expired") as listener, pytest.raises(HandshakeError):
        dial(listener, expired)


def test_a_handshake_with_a_silent_peer_times_out(members: Members) -> None:
    with socket.create_server(LOCAL) as silent, pytest.raises(LinkTimeout, match=r"within 0\.05 s"):
        dial_tls(silent.getsockname(), members["left"], CONFIG, deadline_s=0.05)


def test_dialing_a_closed_port_fails(members: Members) -> None:
    with socket.create_server(LOCAL) as gone:
        address = gone.getsockname()
    with pytest.raises(LinkClosed, match="cannot reach"):
        dial_tls(address, members["left"], CONFIG, deadline_s=DEADLINE_S)


class Wire:
    """A man in the middle: forwards and records the bytes, and may change them."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.seen = bytearray()
        self.tamper = threading.Event()
        self._target = target
        self._listener = socket.create_server(LOCAL)
        self.address = self._listener.getsockname()
        self._forwarding = run(self._forward)

    def _forward(self) -> None:
        with self._listener.accept()[0] as near, socket.create_connection(self._target) as far:
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
        self._listener.close()
        self._forwarding.result(DEADLINE_S)


@contextlib.contextmanager
def tapped(members: Members) -> Iterator[tuple[StreamLink, StreamLink, Wire]]:
    with TlsListener(members["right"], CONFIG) as listener, Wire(listener.address) as wire:
        accepting = run(listener.accept, deadline_s=DEADLINE_S)
        near = dial_tls(wire.address, members["left"], CONFIG, deadline_s=DEADLINE_S)
        with near, accepting.result(DEADLINE_S) as far:
            yield near, far, wire


def test_all_bytes_on_the_wire_are_encrypted(members: Members) -> None:
    with tapped(members) as (near, far, wire):
        for sender, receiver in ((near, far), (far, near)):
            sender.send(Note(1, "a secret header"), [b"a secret buffer" * 1000], deadline_s=DEADLINE_S)
            assert receive(receiver) == (Note(1, "a secret header"), [b"a secret buffer" * 1000])
        near.close()
    assert len(wire.seen) > 30_000
    for secret in (b"secret", b"RVNF", b"left", b"right"):  # certificates, with their names, are encrypted too
        assert secret not in wire.seen


def test_bytes_changed_on_the_wire_are_rejected(members: Members) -> None:
    with tapped(members) as (near, far, wire):
        near.send(Note(1), [b"as it was"], deadline_s=DEADLINE_S)
        assert receive(far) == (Note(1), [b"as it was"])
        wire.tamper.set()
        near.send(Note(2), [b"as it was not"], deadline_s=DEADLINE_S)
        with pytest.raises(FrameError, match="failed TLS authentication"):
            receive(far)
        assert far.closed
        near.close()
