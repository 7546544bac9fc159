"""Memory that a microbatch frees stays with the process, for the next one to take.

By default glibc gives large blocks back to the system at once, and the next microbatch gets them page by page, zeroed:
thousands of page faults a microbatch, 3 to 8 % of the time of a small GPT's. Elsewhere this does nothing.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

__all__ = ["give_back_memory", "keep_freed_memory"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_KEPT_BYTES = 2**30
_PAD_BYTES = 2**24


def keep_freed_memory() -> bool:
    """Ask the allocator to; whether it could be asked."""
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _KEPT_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _PAD_BYTES))
    return all(mallopt(key, value) == 1 for key, value in settings)


def give_back_memory() -> bool:
    """Give what was kept back to the system, when the next user is a long time off; whether there was any."""
    malloc_trim = _glibc("malloc_trim")
    return malloc_trim is not None and malloc_trim(0) == 1


def _glibc(name: str) -> Any:
    """A function of the C library; None where there is no such."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
