"""TLS channels between hosts: mutual TLS 1.3 over TCP, for members of one run only.

Both sides present a certificate of the run's authority, and each checks with `allowed` whether the named node may be at
the other end. Addresses prove nothing: a node is identified by its certificate alone.

OpenSSL must not be in two calls at once for one connection, yet one thread sends while another receives. So OpenSSL
works on memory only, under a lock held for microseconds, and the socket is read, written and waited for outside the
lock. This also costs less than the system calls of OpenSSL, one per record of 16 kB. SO_RCVLOWAT batches wake-ups for
large reads, because a wake-up on a busy core costs more than decrypting the data.

In TLS 1.3 the client finishes the handshake before the server has verified its certificate. So each side then sends one
byte, accepted or rejected, and the link exists only after both have accepted.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from ravnest.core.clock import Deadline
from ravnest.errors import FrameError, HandshakeError, IdentityError, LinkClosed, LinkTimeout
from ravnest.transport.address import Address, show
from ravnest.transport.identity import Identity
from ravnest.transport.socket import Handshake, SocketChannel

__all__ = [
    "Allowed",
    "TlsChannel",
    "authenticate",
    "connect_tcp",
    "mutual_handshake",
    "receive_bytes",
    "send_bytes",
    "tls_context",
    "tune",
]

Allowed: TypeAlias = Callable[[str], bool]
"""Whether the node of this name may be at the other end."""

_SLICE_BYTES = 128 * 1024  # encrypted, then sent: stays in the core's cache in between
_MAX_WATERMARK_BYTES = 256 * 1024  # a higher one would delay the end of a frame
_RECORD_BYTES = 17 * 1024  # the most that OpenSSL holds back: an incomplete record
_ACCEPTED, _REJECTED = b"\x01", b"\x00"

# A host that lost power sends nothing: keepalive closes an idle link after about half a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class TlsChannel(SocketChannel):
    """A `Channel` over a connected TCP socket; usable after `authenticate` or `mutual_handshake`."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._lock = threading.Lock()  # guards the three above
        self._unsent = memoryview(b"")  # used by the writing thread
        self._arrived = memoryview(bytearray(_SLICE_BYTES))  # used by the reading thread
        self._wanted_bytes = 0  # size of the last read that found nothing

    def try_write(self, views: Sequence[memoryview]) -> int:
        """Encrypt and send; encrypts nothing while the socket is not writable, because it could not be taken back."""
        if not self.try_flush() or not self.wait_writable(0):
            return 0
        taken_bytes = 0
        with self._lock:
            for view in views:
                taken_bytes += self._encrypt(view[: _SLICE_BYTES - taken_bytes])
                if taken_bytes == _SLICE_BYTES:
                    break
            self._unsent = memoryview(self._outgoing.read())
        self.try_flush()
        return taken_bytes

    def try_flush(self) -> bool:
        while self._unsent:
            sent_bytes = super().try_write([self._unsent])
            if not sent_bytes:
                return False
            self._unsent = self._unsent[sent_bytes:]
        return True

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        self._wanted_bytes = 0
        while True:
            got_bytes = self._decrypt(views[0])
            if got_bytes is not None:
                return got_bytes
            arrived_bytes = super().try_read([self._arrived])
            if not arrived_bytes:
                self._wanted_bytes = sum(view.nbytes for view in views)
                return arrived_bytes
            with self._lock:
                self._incoming.write(self._arrived[:arrived_bytes])

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait for the wanted bytes, less the most that OpenSSL may hold back; encryption only adds to their number."""
        self.set_low_watermark(max(1, min(_MAX_WATERMARK_BYTES, self._wanted_bytes - _RECORD_BYTES)))
        return super().wait_readable(timeout_s)

    def try_handshake(self) -> bool:
        """Advance with the bytes that have arrived; true when the handshake is done."""
        while True:
            try:
                self._ssl.do_handshake()
                return True
            except ssl.SSLWantReadError:
                arrived_bytes = super().try_read([self._arrived])
                if not arrived_bytes:
                    if arrived_bytes == 0:
                        raise HandshakeError("peer closed the connection during the handshake") from None
                    return False
                self._incoming.write(self._arrived[:arrived_bytes])
            finally:
                self._unsent = memoryview(bytes(self._unsent) + self._outgoing.read())
                self.try_flush()

    def peer_name(self) -> str:
        """Name in the peer's certificate, which the handshake has verified against the authority."""
        certificate = cast("dict[str, Any]", self._ssl.getpeercert() or {})
        common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        alternative = [value for key, value in certificate.get("subjectAltName", ()) if key == "DNS"]
        if len(common) != 1 or common != alternative:
            raise HandshakeError(
                f"peer's certificate must have one name, as common and as alternative name; got {common}, {alternative}"
            )
        return str(common[0])

    def _encrypt(self, view: memoryview) -> int:
        done_bytes = 0
        while done_bytes < view.nbytes:
            done_bytes += self._ssl.write(view[done_bytes:])
        return done_bytes

    def _decrypt(self, view: memoryview) -> int | None:
        """Fill `view` from the bytes that have arrived; OpenSSL returns one record at a time."""
        got_bytes = 0
        with self._lock:
            try:
                while got_bytes < view.nbytes:
                    # With a buffer, `read` returns a count; its stub says bytes.
                    record_bytes = cast("int", self._ssl.read(view.nbytes - got_bytes, view[got_bytes:]))
                    if not record_bytes:
                        return got_bytes
                    got_bytes += record_bytes
            except ssl.SSLWantReadError:
                return got_bytes or None
            except ssl.SSLError as error:
                raise FrameError(f"received data failed TLS authentication: {_reason(error)}") from error
        return got_bytes


def mutual_handshake(channel: TlsChannel, allowed: Allowed) -> Handshake[str]:
    """Authenticate both ends and exchange whether each allows the other; returns the peer's name."""
    name = yield from authenticate(channel)
    is_allowed = allowed(name)
    yield from send_bytes(channel, _ACCEPTED if is_allowed else _REJECTED)
    answer = b""
    with contextlib.suppress(FrameError, LinkClosed):  # a TLS alert: the peer's TLS rejected this node's certificate
        answer = yield from receive_bytes(channel, 1)
    if not is_allowed:
        raise HandshakeError(f"{name} is not allowed on this link")
    if answer != _ACCEPTED:
        raise HandshakeError(f"{name} rejected this node's certificate or name")
    return name


def authenticate(channel: TlsChannel) -> Handshake[str]:
    """Run the TLS handshake alone; returns the name in the peer's certificate."""
    try:
        while not channel.try_handshake():
            yield selectors.EVENT_READ if channel.try_flush() else selectors.EVENT_WRITE
    except ssl.SSLError as error:  # the alert has been sent
        raise HandshakeError(f"peer could not be authenticated: {_reason(error)}") from error
    return channel.peer_name()


def send_bytes(channel: TlsChannel, data: bytes) -> Handshake[None]:
    left = memoryview(data)
    while left:
        if taken_bytes := channel.try_write([left]):
            left = left[taken_bytes:]
        else:
            yield selectors.EVENT_WRITE
    while not channel.try_flush():
        yield selectors.EVENT_WRITE


def receive_bytes(channel: TlsChannel, num_bytes: int) -> Handshake[bytes]:
    """Read exactly `num_bytes`; later bytes stay in the channel."""
    data = bytearray(num_bytes)
    left = memoryview(data)
    while left:
        got_bytes = channel.try_read([left])
        if got_bytes is None:
            yield selectors.EVENT_READ
        elif got_bytes == 0:
            raise LinkClosed("peer closed the connection")
        else:
            left = left[got_bytes:]
    return bytes(data)


def tls_context(identity: Identity, *, server_side: bool) -> ssl.SSLContext:
    """Create a context for TLS 1.3 only, with a certificate required from the peer and without resumption."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names are checked by `allowed`, independent of addresses
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(identity.certificate_path, identity.key_path)
        context.load_verify_locations(identity.authority_path)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"the identity in {identity.directory} cannot be used: {error}") from error
    if server_side:
        context.num_tickets = 0
    return context


def connect_tcp(address: Address, deadline: Deadline) -> socket.socket:
    """Open a TCP connection to `address`."""
    try:
        return socket.create_connection(address, timeout=max(deadline.left_s(), 0.001))  # 0 would not wait at all
    except TimeoutError as error:
        raise LinkTimeout(f"no answer from {show(address)} within {deadline.seconds:g} s") from error
    except OSError as error:
        raise LinkClosed(f"cannot reach {show(address)}: {error}") from error


def tune(sock: socket.socket) -> None:
    """Send small messages at once (TCP_NODELAY) and detect a vanished peer (keepalive)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # each system has some of them
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _reason(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", "") or error.reason or str(error)
