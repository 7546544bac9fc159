"""The other end of a measured line: answers one peer at a time, for a few seconds each, and keeps nothing."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from collections.abc import Callable

from ..core.config import require
from ..core.errors import LinkClosed, LinkError
from ..net.deadline import Deadline
from .talk import MAX_ECHOES, PING_BYTES, Kind, Request, read_exactly, receive_rate, send_all, send_for

__all__ = ["Answerer"]

_REQUEST_S = 2.0
_ECHO_S = 5.0
_LINGER_S = 2.0


class Answerer:
    """Listens at `address` (port 0: any free one). `serve` answers until `close` is called, from any thread."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        max_upload_bytes_per_s: float | None = None,
        say: Callable[[str], None] = lambda what: None,
    ) -> None:
        require(max_upload_bytes_per_s is None or max_upload_bytes_per_s > 0, "an upload limit must be above 0")
        self._max_upload, self._say = max_upload_bytes_per_s, say
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._sock = socket.create_server(address, family=family, backlog=8)
        except OSError as error:
            raise LinkError(f"cannot listen at {address[0]}:{address[1]}: {error}") from error
        self._sock.setblocking(False)
        self._bell, self._ear = socket.socketpair()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()[:2]
        return host, port

    def close(self) -> None:
        """Answer nobody any more; who is being answered gets to the end."""
        self._bell.close()

    def serve(self) -> None:
        with self._sock, self._ear, selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(self._ear, selectors.EVENT_READ)
            while all(key.fileobj is not self._ear for key, _ in selector.select()):
                with contextlib.suppress(BlockingIOError, ConnectionError):  # it left before it came in
                    sock, peer = self._sock.accept()
                    self._answer(sock, peer[0])

    def _answer(self, sock: socket.socket, peer: str) -> None:
        with sock:
            sock.setblocking(False)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                request = Request.read(sock, Deadline(_REQUEST_S))
                self._say(f"{peer}: {request.kind.name.lower()}")
                match request.kind:
                    case Kind.ECHO:
                        self._echo(sock)
                    case Kind.GIVE:
                        self._give(sock, request.seconds)
                    case Kind.TAKE:
                        self._take(sock, request.seconds)
            except (LinkError, OSError) as error:  # whatever a stranger does ends its own connection alone
                self._say(f"{peer}: closed: {error}")

    def _echo(self, sock: socket.socket) -> None:
        deadline = Deadline(_ECHO_S)
        with contextlib.suppress(LinkClosed):  # it has had enough
            for _ in range(MAX_ECHOES):
                send_all(sock, read_exactly(sock, PING_BYTES, deadline), deadline)

    def _give(self, sock: socket.socket, seconds: float) -> None:
        with contextlib.suppress(LinkClosed):  # it counts its own seconds, and leaves when they are over
            send_for(sock, seconds, self._max_upload)

    def _take(self, sock: socket.socket, seconds: float) -> None:
        rate = receive_rate(sock, seconds, _REQUEST_S)
        send_all(sock, struct.pack("!d", rate), Deadline(_REQUEST_S))
        sock.shutdown(socket.SHUT_WR)
        # To close with bytes unread would take back the answer: read on until the peer has it.
        with contextlib.suppress(LinkClosed):
            receive_rate(sock, _LINGER_S, _LINGER_S)
