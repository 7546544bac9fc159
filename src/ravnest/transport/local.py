"""Connects processes on one host over unix sockets, without encryption: file permissions control access.

Every node of a host that belongs to the same user listens in one private directory:

    DIRECTORY/NAME.sock

Of two nodes the controlling one (`is_controlling`) connects and sends a hello: its name, and the introduction of the
link. The other end answers with the same introduction as soon as it expects that link.

    controlling  hello (name, introduction) ->
                 <- introduction                controlled

`unix_link` makes a link of a connected socket; `unix_pair` makes both ends, for a process and its child.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ravnest.core.clock import Backoff, Deadline
from ravnest.core.ids import check_id
from ravnest.errors import HandshakeError, LinkClosed, LinkError, LinkTimeout
from ravnest.transport.introduction import (
    INTRODUCTION_BYTES,
    Introduction,
    check_introduction,
    decode_introduction,
    encode_introduction,
    is_controlling,
)
from ravnest.transport.link import LinkConfig
from ravnest.transport.socket import SocketChannel
from ravnest.transport.stream import StreamLink

__all__ = [
    "HELLO_BYTES",
    "LocalEndpoint",
    "connect_local",
    "control_socket",
    "decode_hello",
    "dial_local_feed",
    "feed_socket",
    "listen_local",
    "socket_path",
    "unix_link",
    "unix_pair",
]

_BUFFER_BYTES = 2**20  # the least CPU per byte; the usual default of 200 kB costs half as much again


def unix_pair(config: LinkConfig, *, names: tuple[str, str] = ("left", "right")) -> tuple[StreamLink, StreamLink]:
    """Create both ends of a link, for a process and its child or for two threads."""
    left, right = socket.socketpair()
    return unix_link(left, config, peer=names[1]), unix_link(right, config, peer=names[0])


def unix_link(sock: socket.socket, config: LinkConfig, *, peer: str) -> StreamLink:
    """Create a link over a connected socket, which the link then owns."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):  # over the system's limit: slower, not wrong
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return StreamLink(SocketChannel(sock), config, peer=peer)


_NAME_BYTES = 64
HELLO_BYTES = _NAME_BYTES + INTRODUCTION_BYTES
_HELLO_S = 10.0
_MAX_WAITING = 256
_MAX_PATH_BYTES = 103  # 104 on macOS, 108 on Linux, less the final zero


def socket_path(directory: Path, name: str) -> Path:
    """Return the path of a node's socket."""
    return directory / f"{check_id(name)}.sock"


def listen_local(path: Path) -> socket.socket:
    """Listen at `path`, whose directory must belong to this user alone; replaces the socket of a dead process."""
    sock = _socket(path)
    try:
        _require_private(path.parent)
        _remove_stale(path)
        sock.bind(str(path))
        sock.listen(64)
    except OSError as error:
        sock.close()
        raise LinkError(f"cannot listen at {path}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def connect_local(path: Path, name: str, mine: Introduction, *, deadline_s: float) -> socket.socket:
    """Connect to the process at `path` and introduce this node; waits for it to listen and to expect the link."""
    deadline, backoff = Deadline(deadline_s), Backoff(0.01, 0.5)
    while True:
        try:
            return _connect(path, name, mine, deadline)
        except (ConnectionError, FileNotFoundError, LinkClosed) as error:
            wait_s = backoff.next_s()
            if deadline.left_s() <= wait_s:
                raise LinkTimeout(f"no process answered at {path} within {deadline_s:g} s") from error
            time.sleep(wait_s)
        except TimeoutError as error:
            raise LinkTimeout(f"no process answered at {path} within {deadline_s:g} s") from error


def decode_hello(data: bytes) -> tuple[str, Introduction]:
    """Decode exactly `HELLO_BYTES`: the name of the other end, and its introduction."""
    try:
        name = check_id(data[:_NAME_BYTES].rstrip(b"\0").decode())
    except ValueError as error:
        raise HandshakeError(f"the hello has no valid name: {error}") from error
    return name, decode_introduction(data[_NAME_BYTES:])


def control_socket(directory: Path) -> Path:
    """Return the socket at which the coordinator of a local run serves HTTP."""
    return directory / "control.sock"


def feed_socket(directory: Path) -> Path:
    """Return the socket at which the coordinator of a local run feeds its clusters."""
    return directory / "feed.sock"


def dial_local_feed(directory: Path, name: str, config: LinkConfig, *, purpose: str, deadline_s: float) -> StreamLink:
    """Open a link to the coordinator of a local run, which listens in `directory`."""
    mine = Introduction.of(config.generation, purpose)
    sock = connect_local(feed_socket(directory), name, mine, deadline_s=deadline_s)
    return unix_link(sock, config, peer="coordinator")


class LocalEndpoint:
    """Accepts and makes connections between the nodes of one host. One thread accepts; `connect` is for any thread."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._path = socket_path(directory, name)
        self._sock = listen_local(self._path)
        self._changed = threading.Condition()  # guards the next three
        self._arrived: dict[tuple[str, Introduction], socket.socket] = {}
        self._callers: dict[tuple[str, Introduction], object] = {}
        self._is_open = True
        self._thread = threading.Thread(target=self._accept, name="local endpoint", daemon=True)
        self._thread.start()

    def connect(self, peer: str, introduction: Introduction, *, deadline_s: float) -> socket.socket:
        """Return a connected socket to `peer`, which must call this node too; a newer call for the same link wins."""
        if is_controlling(self._name, peer):
            return connect_local(socket_path(self._directory, peer), self._name, introduction, deadline_s=deadline_s)
        return self._await(peer, introduction, Deadline(deadline_s))

    def close(self) -> None:
        """Stop listening; connections already handed out stay open."""
        with self._changed:
            self._is_open = False
            arrived, self._arrived = self._arrived, {}
            self._changed.notify_all()
        for sock in arrived.values():
            sock.close()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._sock.close()
        self._path.unlink(missing_ok=True)

    def _await(self, peer: str, introduction: Introduction, deadline: Deadline) -> socket.socket:
        key, call = (peer, introduction), object()
        with self._changed:
            self._callers[key] = call
            self._changed.notify_all()
            try:
                while True:
                    if not self._is_open:
                        raise LinkClosed("endpoint closed locally")
                    if self._callers[key] is not call:
                        raise LinkClosed(f"a newer call to {peer} replaced this one")
                    if (sock := self._arrived.pop(key, None)) is not None and _answer(sock, introduction):
                        return sock
                    if sock is None and not self._changed.wait(deadline.left_s()):
                        raise LinkTimeout(f"{peer} did not connect within {deadline.seconds:g} s")
            finally:
                if self._callers.get(key) is call:
                    del self._callers[key]

    def _accept(self) -> None:
        for sock in self._connections():
            try:
                sock.settimeout(_HELLO_S)
                key = decode_hello(_read(sock, HELLO_BYTES))
            except (OSError, LinkError):
                sock.close()
                continue
            with self._changed:
                older = [self._arrived.pop(key, None)]
                if len(self._arrived) >= _MAX_WAITING:
                    older.append(self._arrived.pop(next(iter(self._arrived))))
                if self._is_open:
                    self._arrived[key] = sock
                else:
                    older.append(sock)
                self._changed.notify_all()
            for one in older:
                if one is not None:
                    one.close()

    def _connections(self) -> Iterator[socket.socket]:
        while self._is_open:
            try:
                yield self._sock.accept()[0]
            except OSError:  # closed
                return


def _connect(path: Path, name: str, mine: Introduction, deadline: Deadline) -> socket.socket:
    sock = _socket(path)
    try:
        sock.settimeout(max(deadline.left_s(), 0.001))
        sock.connect(str(path))
        sock.sendall(name.encode().ljust(_NAME_BYTES, b"\0") + encode_introduction(mine))
        sock.settimeout(max(deadline.left_s(), 0.001))
        check_introduction(mine, decode_introduction(_read(sock, INTRODUCTION_BYTES)), path.stem)
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


def _answer(sock: socket.socket, introduction: Introduction) -> bool:
    """Accept a connection; false if its other end has closed it meanwhile."""
    try:
        sock.sendall(encode_introduction(introduction))
        sock.settimeout(None)
    except OSError:
        sock.close()
        return False
    return True


def _read(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise LinkClosed("the other end closed the connection")
        data += part
    return bytes(data)


def _socket(path: Path) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise LinkError("this system has no unix sockets")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise LinkError(f"the path {path} is longer than {_MAX_PATH_BYTES} bytes: use a shorter directory")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _require_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.stat()
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise LinkError(f"directory {directory} is accessible to other users: restrict it to this user (chmod 700)")


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a dead process; raise `LinkError` if a process still answers at it."""
    if not path.is_socket():
        return
    with contextlib.closing(_socket(path)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise LinkError(f"another process listens at {path}: end it, or use another directory")
