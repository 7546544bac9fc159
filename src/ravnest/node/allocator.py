"""Memory that a microbatch frees stays with the process, for the next one to take.

By default glibc gives large blocks back to the system at once, and the next microbatch gets them page by page, zeroed:
thousands of page faults a microbatch, 3 to 8 % of the time of a small GPT's. Elsewhere this does nothing.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_KEPT_BYTES = 2**30
_PAD_BYTES = 2**24


def keep_freed_memory() -> bool:
    """Ask the allocator to; whether it could be asked."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _KEPT_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _PAD_BYTES))
    return all(mallopt(key, value) == 1 for key, value in settings)
