"""Memory of a member that its neighbours on the same host read in place, so that a piece need not be sent at all.

    owner: array = window.floats(n)  ... "the piece lies at byte 4096"  -->  reader: seen[4096 : 4096 + num_bytes]

The owner alone can write. Its size is fixed for good, because reading memory that is gone would kill the reader; a page
of it costs nothing before it is used.
"""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np

from ravnest.core.config import require
from ravnest.core.errors import HandshakeError
from ravnest.rings.codec import Bytes, Floats

if sys.platform != "win32":
    import fcntl

__all__ = ["Window", "fix_size", "is_fixed", "see"]

_ALIGN_BYTES = 64
_SEALS = 0x0002 | 0x0004  # may not shrink, may not grow


class Window:
    """Owns its memory, out of which arrays are taken; they last as long as they are used."""

    def __init__(self, num_bytes: int) -> None:
        require(num_bytes > 0, f"a window has at least 1 byte, not {num_bytes}")
        self.fd = os.memfd_create("ravnest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_bytes)
        fix_size(self.fd)
        self._memory: Bytes = np.frombuffer(mmap.mmap(self.fd, num_bytes), np.uint8)
        self._taken_bytes = 0

    def floats(self, num_elements: int) -> Floats:
        """A new array in the window."""
        start, stop = self._taken_bytes, self._taken_bytes + 4 * num_elements
        require(stop <= self._memory.size, f"a window of {self._memory.size} bytes has no room for {stop}")
        self._taken_bytes = -(-stop // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._memory[start:stop].view(np.float32)

    def find(self, array: Floats) -> int | None:
        """The byte of the window at which the array begins; None if it lies elsewhere."""
        at = int(array.ctypes.data) - int(self._memory.ctypes.data)
        return at if at >= 0 and at + array.nbytes <= self._memory.size else None

    def close(self) -> None:
        """Offer it to nobody any more. Who sees it already still does."""
        os.close(self.fd)


def see(fd: int, peer: str) -> Bytes:
    """All of a peer's window, to read; `fd` is not needed any more then."""
    if not is_fixed(fd) or not os.fstat(fd).st_size:
        raise HandshakeError(f"{peer} offered a window that could vanish")
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ), np.uint8)


def fix_size(fd: int) -> None:
    """Memory of this size for good."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def is_fixed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS)
