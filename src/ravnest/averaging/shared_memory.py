"""Links through shared memory between processes of one host, and buffers that the peer reads in place.

`SharedLink` replaces a unix socket, which costs a system call, kernel pages and a switch of the interpreter lock for
about every 30 kB. Here bytes go through a ring buffer of 2 MB that stays in the cache. Two eventfd counters report the
bytes written and the bytes read; the socket over which the descriptors were exchanged stays open and signals when the
peer has closed or died.

    writer: bytes --> ring buffer, filled += n        reader: ring buffer --> bytes, emptied += n

`SharedBuffer` is memory of one process that its peers read in place, so that a chunk need not be sent at all:

    owner: array = buffer.floats(n)  ... message "chunk at offset 4096"  -->  reader: peer_buffer[4096 : 4096 + n]

Only the owner can write to it. Its size is sealed, because reading beyond the end of a shrunken mapping would kill the
reader; unused pages cost no memory.

Linux only (`is_available`); elsewhere use a unix socket, which is slower. Both ends must run as the same user.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
from collections.abc import Sequence

import numpy as np

from ravnest.averaging.codec import Bytes, Floats
from ravnest.core.config import require
from ravnest.errors import FrameError, HandshakeError, LinkClosed
from ravnest.transport.link import LinkConfig
from ravnest.transport.stream import StreamLink

__all__ = ["SharedBuffer", "SharedLink", "is_available", "map_peer_buffer", "shared_link"]

if sys.platform != "win32":
    import fcntl


_ALIGN_BYTES = 64
_CAPACITY_BYTES = 2**21
_HELLO = b"RVNS"
_HANDSHAKE_S = 10.0
_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK and F_SEAL_GROW


class SharedBuffer:
    """Memory that peers on this host can map for reading; arrays in it stay valid as long as they are referenced."""

    def __init__(self, num_bytes: int) -> None:
        require(num_bytes > 0, f"num_bytes must be > 0, got {num_bytes}")
        self.fd = _sealed_memory(num_bytes)
        self._memory: Bytes = np.frombuffer(mmap.mmap(self.fd, num_bytes), np.uint8)
        self._used_bytes = 0

    def floats(self, num_elements: int) -> Floats:
        """Allocate an array in the buffer."""
        start, stop = self._used_bytes, self._used_bytes + 4 * num_elements
        require(stop <= self._memory.size, f"array does not fit: needs {stop} bytes, buffer has {self._memory.size}")
        self._used_bytes = -(-stop // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._memory[start:stop].view(np.float32)

    def offset_of(self, array: Floats) -> int | None:
        """The byte offset of an array in the buffer; None if it is not in it."""
        offset = int(array.ctypes.data) - int(self._memory.ctypes.data)
        return offset if offset >= 0 and offset + array.nbytes <= self._memory.size else None

    def close(self) -> None:
        """Close the descriptor: no further peer can map the buffer. Existing mappings stay valid."""
        os.close(self.fd)


def map_peer_buffer(fd: int, peer: str) -> Bytes:
    """Map a peer's `SharedBuffer` read-only; the caller may close `fd` afterwards."""
    if not _is_sealed(fd) or not os.fstat(fd).st_size:
        raise HandshakeError(f"the shared buffer of {peer} is empty or its size is not sealed")
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ), np.uint8)


def _sealed_memory(num_bytes: int) -> int:
    """The descriptor of new memory whose size cannot change."""
    fd = os.memfd_create("ravnest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _is_sealed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS)


def is_available() -> bool:
    """Whether this system supports memfd, eventfd and passing of descriptors."""
    return hasattr(os, "memfd_create") and hasattr(os, "eventfd") and hasattr(socket, "send_fds")


class _RingBuffer:
    """One direction of a link: memory and two counters, which it owns. One end writes, the other reads."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = tuple(fds)
        memory, self.filled, self.emptied = self.fds
        self._memory: Bytes = np.frombuffer(mmap.mmap(memory, _CAPACITY_BYTES), np.uint8)
        self._position = 0
        self._available_bytes = 0  # free space for the writer, unread bytes for the reader
        self._unreported_bytes = 0  # read, but not yet added to `emptied`

    def start_writing(self) -> None:
        """All space is free for the writer."""
        self._available_bytes = _CAPACITY_BYTES

    def _update(self, counter: int) -> None:
        """Add the bytes that the other end has reported."""
        with contextlib.suppress(BlockingIOError):
            self._available_bytes += os.eventfd_read(counter)
        if self._available_bytes > _CAPACITY_BYTES:
            raise FrameError(f"the peer reported {self._available_bytes} bytes, the capacity is {_CAPACITY_BYTES}")

    def write(self, views: Sequence[memoryview]) -> int:
        if self._available_bytes < sum(view.nbytes for view in views):
            self._update(self.emptied)
        done_bytes = 0
        for view in views:
            done_bytes += self._move(np.frombuffer(view, np.uint8), into_memory=True)
            if not self._available_bytes:
                break
        if done_bytes:
            os.eventfd_write(self.filled, done_bytes)
        return done_bytes

    def read(self, view: memoryview) -> int:
        """Free space is reported in large amounts, and always before the reader has to wait."""
        if self._available_bytes < view.nbytes:
            self._update(self.filled)
        done_bytes = self._move(np.frombuffer(view, np.uint8), into_memory=False)
        self._unreported_bytes += done_bytes
        if self._unreported_bytes and (not self._available_bytes or self._unreported_bytes >= _CAPACITY_BYTES // 4):
            os.eventfd_write(self.emptied, self._unreported_bytes)
            self._unreported_bytes = 0
        return done_bytes

    def _move(self, data: Bytes, *, into_memory: bool) -> int:
        """Copy as much as possible, wrapping around at the end of the memory."""
        done_bytes = 0
        while done_bytes < data.size and self._available_bytes:
            count = min(data.size - done_bytes, self._available_bytes, _CAPACITY_BYTES - self._position)
            inside, outside = (
                self._memory[self._position : self._position + count],
                data[done_bytes : done_bytes + count],
            )
            np.copyto(*((inside, outside) if into_memory else (outside, inside)))
            self._position = (self._position + count) % _CAPACITY_BYTES
            self._available_bytes -= count
            done_bytes += count
        return done_bytes

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class _SharedChannel:
    """A `Channel` over two ring buffers and the socket of their exchange, all of which it owns."""

    def __init__(self, sock: socket.socket, outgoing: _RingBuffer, incoming: _RingBuffer) -> None:
        self._sock, self._outgoing, self._incoming = sock, outgoing, incoming
        sock.setblocking(False)
        outgoing.start_writing()

    def try_write(self, views: Sequence[memoryview]) -> int:
        done_bytes = self._outgoing.write(views)
        if not done_bytes and self._is_closed_by_peer():
            raise BrokenPipeError("the peer has closed the link")
        return done_bytes

    def try_flush(self) -> bool:
        return True

    def try_read(self, views: Sequence[memoryview]) -> int | None:
        done_bytes = self._incoming.read(views[0])
        if not done_bytes and self._is_closed_by_peer():
            return self._incoming.read(views[0])  # bytes written before the close have been counted by now
        return done_bytes or None

    def wait_writable(self, timeout_s: float) -> bool:
        return self._wait(self._outgoing.emptied, timeout_s)

    def wait_readable(self, timeout_s: float) -> bool:
        return self._wait(self._incoming.filled, timeout_s)

    def detect_dead_peer(self, after_s: float) -> None:
        """Not needed: the kernel closes the sockets of a dead process immediately."""

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):  # closed by the peer already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
        self._outgoing.close()
        self._incoming.close()

    def _is_closed_by_peer(self) -> bool:
        """No data follows the handshake, so the socket becomes readable only when it is closed."""
        return self._wait(-1, 0.0)

    def _wait(self, counter: int, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if counter >= 0:
            poller.register(counter, select.POLLIN)
        return bool(poller.poll(min(timeout_s * 1000 + 1, 2**31 - 1) if timeout_s else 0))


class SharedLink(StreamLink):
    """A link to a process of this host. The peer may read `buffer`; this end may read `peer_buffer`."""

    def __init__(
        self,
        channel: _SharedChannel,
        config: LinkConfig,
        *,
        peer: str,
        buffer: SharedBuffer | None,
        peer_buffer: Bytes | None,
    ) -> None:
        super().__init__(channel, config, peer=peer)
        self.buffer, self.peer_buffer = buffer, peer_buffer


def shared_link(
    sock: socket.socket, config: LinkConfig, *, peer: str, buffer: SharedBuffer | None = None
) -> SharedLink:
    """Set up a link over a connected unix socket, which it then owns; the peer must call this too."""
    own = _new_descriptors()
    theirs: list[int] = []
    try:
        sock.settimeout(_HANDSHAKE_S)
        socket.send_fds(sock, [_HELLO], own if buffer is None else [*own, buffer.fd])
        hello, theirs, _, _ = socket.recv_fds(sock, len(_HELLO), 4)
        _check_hello(hello, theirs, peer)
        peer_buffer = map_peer_buffer(theirs[3], peer) if len(theirs) > 3 else None
        for fd in theirs[3:]:
            os.close(fd)
        del theirs[3:]
        for counter in theirs[1:]:
            os.set_blocking(counter, False)
        channel = _SharedChannel(sock, _RingBuffer(own), _RingBuffer(theirs))
        return SharedLink(channel, config, peer=peer, buffer=buffer, peer_buffer=peer_buffer)
    except BaseException as error:
        sock.close()
        for fd in (*own, *theirs):
            os.close(fd)
        if isinstance(error, OSError):
            raise LinkClosed(f"could not set up shared memory with {peer}: {error}") from error
        raise


def _new_descriptors() -> list[int]:
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    return [_sealed_memory(_CAPACITY_BYTES), os.eventfd(0, flags), os.eventfd(0, flags)]


def _check_hello(hello: bytes, fds: Sequence[int], peer: str) -> None:
    if hello != _HELLO or len(fds) not in (3, 4):
        raise HandshakeError(f"{peer} did not offer shared memory")
    size = os.fstat(fds[0]).st_size
    if size != _CAPACITY_BYTES or not _is_sealed(fds[0]):
        raise HandshakeError(f"the ring buffer of {peer} must be sealed at {_CAPACITY_BYTES} bytes, got {size}")
