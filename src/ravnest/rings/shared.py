"""Links between processes of one host through memory that both have: what one copies in, the other copies out.

A unix socket costs a system call, pages from the kernel and a turn of the interpreter's lock for every 30 kB or so.
Here a megabyte goes through a ring of bytes that stays in the cache. Two counters that can be waited for say how much
was put in and how much room was made again; the socket over which the memory was exchanged stays open and tells when
the peer has closed or died.

    writer: bytes --> memory, filled += n        reader: memory --> bytes, emptied += n

Each end may also show a `Window`: what lies there is read by the peer in place, and only words go through the link.

This is Linux only (`is_available`); elsewhere a unix socket does the same, slower. Both ends are processes of one user.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
from collections.abc import Sequence

import numpy as np

from ravnest.core.errors import FrameError, HandshakeError, LinkClosed
from ravnest.net.link import LinkConfig
from ravnest.net.stream import StreamLink
from ravnest.rings.codec import Bytes
from ravnest.rings.window import Window, fix_size, is_fixed, see

__all__ = ["SharedLink", "is_available", "shared_link", "shared_pair"]

_CAPACITY_BYTES = 2**21
_HELLO = b"RVNS"
_HANDSHAKE_S = 10.0


def is_available() -> bool:
    """Whether this system has memory and counters that can be sent to another process."""
    return hasattr(os, "memfd_create") and hasattr(os, "eventfd") and hasattr(socket, "send_fds")


class _Way:
    """One way of a link: the memory, and the two counters, which it owns. Each end uses one half of the methods."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)
        memory, self.filled, self.emptied = self.fds
        self._memory: Bytes = np.frombuffer(mmap.mmap(memory, _CAPACITY_BYTES), np.uint8)
        self._at = 0
        self._num_bytes = 0  # for the writer the room that is left, for the reader what is there
        self._untold_bytes = 0  # that the reader has taken out

    def offer_room(self) -> None:
        """The writer begins with all of it."""
        self._num_bytes = _CAPACITY_BYTES

    def update(self, counter: int) -> None:
        """Take over what the other end has counted since."""
        with contextlib.suppress(BlockingIOError):
            self._num_bytes += os.eventfd_read(counter)
        if self._num_bytes > _CAPACITY_BYTES:
            raise FrameError("the peer counts more bytes than there are")

    def write(self, views: Sequence[memoryview]) -> int:
        if self._num_bytes < sum(view.nbytes for view in views):
            self.update(self.emptied)
        done_bytes = 0
        for view in views:
            done_bytes += self._move(np.frombuffer(view, np.uint8), into_memory=True)
            if not self._num_bytes:
                break
        if done_bytes:
            os.eventfd_write(self.filled, done_bytes)
        return done_bytes

    def read(self, view: memoryview) -> int:
        """The writer is told of room when there is much of it, and of all of it before anybody waits for more."""
        if self._num_bytes < view.nbytes:
            self.update(self.filled)
        done_bytes = self._move(np.frombuffer(view, np.uint8), into_memory=False)
        self._untold_bytes += done_bytes
        if self._untold_bytes and (not self._num_bytes or self._untold_bytes >= _CAPACITY_BYTES // 4):
            os.eventfd_write(self.emptied, self._untold_bytes)
            self._untold_bytes = 0
        return done_bytes

    def _move(self, data: Bytes, *, into_memory: bool) -> int:
        """Copy what there is room for, up to the end of the memory and then from its beginning."""
        done_bytes = 0
        while done_bytes < data.size and self._num_bytes:
            count = min(data.size - done_bytes, self._num_bytes, _CAPACITY_BYTES - self._at)
            inside, outside = self._memory[self._at : self._at + count], data[done_bytes : done_bytes + count]
            np.copyto(*((inside, outside) if into_memory else (outside, inside)))
            self._at = (self._at + count) % _CAPACITY_BYTES
            self._num_bytes -= count
            done_bytes += count
        return done_bytes

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class _SharedChannel:
    """A `Channel` over two ways and the socket that they came through, all of which it owns."""

    def __init__(self, sock: socket.socket, outgoing: _Way, incoming: _Way) -> None:
        self._sock, self._outgoing, self._incoming = sock, outgoing, incoming
        sock.setblocking(False)
        outgoing.offer_room()

    def try_write(self, views: Sequence[memoryview]) -> int:
        done_bytes = self._outgoing.write(views)
        if not done_bytes and self._is_over():
            raise BrokenPipeError("the other end is closed")
        return done_bytes

    def try_flush(self) -> bool:
        return True

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        done_bytes = self._incoming.read(views[0])
        if not done_bytes and self._is_over():
            return self._incoming.read(views[0])  # what came before the end has been counted by now
        return done_bytes or None

    def wait_writable(self, timeout_s: float) -> bool:
        return self._wait(self._outgoing.emptied, timeout_s)

    def wait_readable(self, timeout_s: float) -> bool:
        return self._wait(self._incoming.filled, timeout_s)

    def notice_death(self, after_s: float) -> None:
        """The system closes a dead process's sockets at once, and there is no other machine."""

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):  # the peer was first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        self._outgoing.close()
        self._incoming.close()

    def _is_over(self) -> bool:
        """Nothing is ever said on the socket after the handshake, so it can be read only when it has ended."""
        return self._wait(-1, 0.0)

    def _wait(self, counter: int, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if counter >= 0:
            poller.register(counter, select.POLLIN)
        return bool(poller.poll(min(timeout_s * 1000 + 1, 2**31 - 1) if timeout_s else 0))


class SharedLink(StreamLink):
    """A link to a process of this host. `window` is what this end shows, `seen` what the other end does."""

    def __init__(
        self, channel: _SharedChannel, config: LinkConfig, *, peer: str, window: Window | None, seen: Bytes | None
    ) -> None:
        super().__init__(channel, config, peer=peer)
        self.window, self.seen = window, seen


def shared_link(sock: socket.socket, config: LinkConfig, *, peer: str, window: Window | None = None) -> SharedLink:
    """A link with the process at the other end of a unix socket, which does the same; it then owns the socket."""
    own = _make()
    theirs: list[int] = []
    try:
        sock.settimeout(_HANDSHAKE_S)
        socket.send_fds(sock, [_HELLO], own if window is None else [*own, window.fd])
        hello, theirs, _, _ = socket.recv_fds(sock, len(_HELLO), 4)
        _check(hello, theirs, peer)
        seen = see(theirs[3], peer) if len(theirs) > 3 else None
        for fd in theirs[3:]:
            os.close(fd)
        del theirs[3:]
        for counter in theirs[1:]:
            os.set_blocking(counter, False)
        channel = _SharedChannel(sock, _Way(own), _Way(theirs))
        return SharedLink(channel, config, peer=peer, window=window, seen=seen)
    except BaseException as error:
        sock.close()
        for fd in (*own, *theirs):
            os.close(fd)
        if isinstance(error, OSError):
            raise LinkClosed(f"no memory could be shared with {peer}: {error}") from error
        raise


def shared_pair(
    config: LinkConfig, windows: tuple[Window | None, Window | None] = (None, None)
) -> tuple[SharedLink, SharedLink]:
    """Two linked ends, for two threads; processes make one end each."""
    left, right = socket.socketpair()
    ends: list[SharedLink] = []
    other = threading.Thread(target=lambda: ends.append(shared_link(right, config, peer="left", window=windows[1])))
    other.start()
    near = shared_link(left, config, peer="right", window=windows[0])
    other.join()
    return near, ends[0]


def _make() -> list[int]:
    memory = os.memfd_create("ravnest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, _CAPACITY_BYTES)
    fix_size(memory)
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    return [memory, os.eventfd(0, flags), os.eventfd(0, flags)]


def _check(hello: bytes, fds: Sequence[int], peer: str) -> None:
    """Of the right size, and for good."""
    if hello != _HELLO or len(fds) not in (3, 4):
        raise HandshakeError(f"{peer} does not speak of shared memory")
    if os.fstat(fds[0]).st_size != _CAPACITY_BYTES or not is_fixed(fds[0]):
        raise HandshakeError(f"{peer} offered other memory than was agreed")
