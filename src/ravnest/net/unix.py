"""Links between processes of one host, over unix sockets: no encryption, the file system says who may.

A socket lives in a directory that only its user may enter. Windows has no such sockets in Python; there
a pair still works, and links by path are refused with a sentence.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from ravnest.core.errors import LinkClosed, LinkError, LinkTimeout
from ravnest.net.deadline import Deadline
from ravnest.net.link import LinkConfig
from ravnest.net.listen import Greeting, ListenConfig, Listener
from ravnest.net.sockets import SocketChannel
from ravnest.net.stream import StreamLink

__all__ = ["connect_unix", "listen_unix", "unix_link", "unix_pair"]

_MAX_PATH_BYTES = 103  # of 104 on macOS, 108 on Linux, less the final zero
_BUFFER_BYTES = 2**20  # a megabyte in flight costs the least per byte; the usual 200 kB a half more


def unix_pair(config: LinkConfig, *, names: tuple[str, str] = ("left", "right")) -> tuple[StreamLink, StreamLink]:
    """Two linked ends, for a process and a child that it starts, or for two threads."""
    left, right = socket.socketpair()
    return unix_link(left, config, peer=names[1]), unix_link(right, config, peer=names[0])


def unix_link(sock: socket.socket, config: LinkConfig, *, peer: str) -> StreamLink:
    """A link over a connected socket, which it then owns."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):  # over the system's limit: slower, not wrong
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    return StreamLink(SocketChannel(sock), config, peer=peer)


def listen_unix(path: Path, config: LinkConfig, *, listening: ListenConfig | None = None) -> Listener:
    """Listen at `path`, in a directory of this user's only; it is made when it does not exist."""

    def greet(sock: socket.socket) -> Greeting:
        yield from ()
        return unix_link(sock, config, peer=str(path))

    sock = _socket(path)
    try:
        _check_private(path.parent)
        _remove_stale(path)
        sock.bind(str(path))
        sock.listen()
    except OSError as error:
        sock.close()
        raise LinkError(f"cannot listen at {path}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return Listener(sock, greet, listening or ListenConfig(), on_closed=lambda: path.unlink(missing_ok=True))


def connect_unix(path: Path, config: LinkConfig, *, deadline_s: float) -> StreamLink:
    """Connect to whoever listens at `path`."""
    sock = _socket(path)
    try:
        sock.settimeout(Deadline(deadline_s).seconds)
        sock.connect(str(path))
        return unix_link(sock, config, peer=str(path))
    except (TimeoutError, BlockingIOError) as error:
        sock.close()
        raise LinkTimeout(f"nobody accepts connections at {path}") from error
    except OSError as error:
        sock.close()
        raise LinkClosed(f"nobody listens at {path}: {error}") from error


def _socket(path: Path) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise LinkError("this system has no unix sockets: use a TLS link to 127.0.0.1")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise LinkError(f"the path {path} is over {_MAX_PATH_BYTES} bytes long: use a shorter directory")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _check_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LinkError(f"others may enter {directory}: give it to this user alone (chmod 700)")


def _remove_stale(path: Path) -> None:
    """A socket file outlives a killed process; one that still answers is somebody's, as is any other file."""
    if not path.is_socket():
        return
    with contextlib.closing(_socket(path)) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise LinkError(f"another process listens at {path}")
