"""Bytes over TLS 1.3, and how two nodes come to trust each other.

OpenSSL must not be in two calls at once for one connection, yet one thread sends while another receives.
So it works on memory only, under a lock that is held for microseconds of arithmetic, and the socket is
read, written and waited for outside the lock. (This also costs less than letting OpenSSL do the system
calls, which it does per record of 16 kB.)

To be woken costs more than to decrypt what came: on a busy core everything must be fetched from memory again. So who
waits for much is woken when much has arrived.

In TLS 1.3 the dialling side finishes before the other has judged its certificate. So each side then
says one byte, accepted or refused, and no link exists before both have said yes.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, cast

from ravnest.core.errors import FrameError, HandshakeError
from ravnest.net.sockets import SocketChannel

__all__ = ["Allowed", "TlsChannel", "shake_hands"]

Allowed: TypeAlias = Callable[[str], bool]
"""Whether a node of this name may be at the other end."""

_SLICE_BYTES = 128 * 1024  # encrypted, then sent: stays in the core's cache in between
_WAKES_BYTES = 256 * 1024  # woken at most so often; more would keep the last of a frame waiting for the core
_RECORD_BYTES = 17 * 1024  # OpenSSL may hold back as much: the beginning of a record
_ACCEPTED, _REFUSED = b"\x01", b"\x00"


class TlsChannel(SocketChannel):
    """A `Channel` over a connected TCP socket; usable once `shake_hands` has run to its end."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._lock = threading.Lock()  # around the three above
        self._unsent = memoryview(b"")  # of the writing thread
        self._arrived = memoryview(bytearray(_SLICE_BYTES))  # of the reading thread
        self._wanted_bytes = 0  # what it waits for, after it found nothing

    def try_write(self, views: Sequence[memoryview]) -> int:
        """What is encrypted must be sent, so nothing is while the socket has no room."""
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
        """What is wanted is still to come, but for what OpenSSL holds back; encrypted it is only more."""
        self.wake_after(max(1, min(_WAKES_BYTES, self._wanted_bytes - _RECORD_BYTES)))
        return super().wait_readable(timeout_s)

    def try_handshake(self) -> bool:
        """Go as far as what has arrived allows; true when the handshake is done."""
        while True:
            try:
                self._ssl.do_handshake()
                return True
            except ssl.SSLWantReadError:
                arrived_bytes = super().try_read([self._arrived])
                if not arrived_bytes:
                    if arrived_bytes == 0:
                        raise HandshakeError("the peer left during the handshake") from None
                    return False
                self._incoming.write(self._arrived[:arrived_bytes])
            finally:
                self._unsent = memoryview(bytes(self._unsent) + self._outgoing.read())
                self.try_flush()

    def peer_name(self) -> str:
        """The node's name in its certificate, which the handshake has checked against the authority."""
        certificate = cast("dict[str, Any]", self._ssl.getpeercert() or {})
        named = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        also = [value for key, value in certificate.get("subjectAltName", ()) if key == "DNS"]
        if len(named) != 1 or named != also:
            raise HandshakeError(f"the peer's certificate names {named} and {also}: it must name one node, twice")
        return str(named[0])

    def _encrypt(self, view: memoryview) -> int:
        done_bytes = 0
        while done_bytes < view.nbytes:
            done_bytes += self._ssl.write(view[done_bytes:])
        return done_bytes

    def _decrypt(self, view: memoryview) -> int | None:
        """Fill `view` from what has arrived; OpenSSL gives one record at a time."""
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
                raise FrameError(f"what arrived is not from the peer of the handshake: {_reason(error)}") from error
        return got_bytes


def shake_hands(channel: TlsChannel, allowed: Allowed) -> Generator[int, None, str]:
    """Authenticate both ways; yields the event to wait for, returns the peer's name."""
    yield from _authenticate(channel)
    name = channel.peer_name()
    is_allowed = allowed(name)
    yield from _say(channel, _ACCEPTED if is_allowed else _REFUSED)
    answer = yield from _hear(channel)
    if not is_allowed:
        raise HandshakeError(f"{name} is not allowed on this link")
    if answer != _ACCEPTED:
        raise HandshakeError(f"{name} does not accept this node's certificate or name")
    return name


def _authenticate(channel: TlsChannel) -> Generator[int, None, None]:
    try:
        while not channel.try_handshake():
            yield selectors.EVENT_READ if channel.try_flush() else selectors.EVENT_WRITE
    except ssl.SSLError as error:  # the alert that says so has been sent
        raise HandshakeError(f"the peer could not be authenticated: {_reason(error)}") from error


def _say(channel: TlsChannel, word: bytes) -> Generator[int, None, None]:
    while not channel.try_write([memoryview(word)]):
        yield selectors.EVENT_WRITE
    while not channel.try_flush():
        yield selectors.EVENT_WRITE


def _hear(channel: TlsChannel) -> Generator[int, None, bytes]:
    """The other side's word, or nothing when it left instead."""
    word = bytearray(1)
    with contextlib.suppress(FrameError):  # an alert: its TLS has refused our certificate
        while (got_bytes := channel.try_read([memoryview(word)])) is None:
            yield selectors.EVENT_READ
        return bytes(word[:got_bytes])
    return b""


def _reason(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", "") or error.reason or str(error)
