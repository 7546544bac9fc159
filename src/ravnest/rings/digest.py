"""A short digest of a result, by which members find out that they have the same bits before any of them uses it.

    column[j] = sum over rows i of word[512 i + j]  (modulo 2**64)        digest = hash(length, columns)

The sum runs at the speed of memory (a cryptographic hash of all bytes takes ten times as long) and any accidental
difference changes it. It is no proof against a member that lies: such a one would send the right digest of wrong bits.
"""

from __future__ import annotations

import hashlib

import numpy as np

from ravnest.rings.codec import Floats

__all__ = ["digest"]

_COLUMNS = 512
_BLOCK_WORDS = _COLUMNS * 256  # a megabyte: stays in the cache between memory and sum


def digest(vector: Floats) -> str:
    """32 hexadecimal digits."""
    whole = vector.size // (2 * _COLUMNS) * (2 * _COLUMNS)
    words = vector[:whole].view(np.uint64)
    hasher = hashlib.blake2b(vector.size.to_bytes(8, "little"), digest_size=16)
    for start in range(0, words.size, _BLOCK_WORDS):
        rows = words[start : start + _BLOCK_WORDS].reshape(-1, _COLUMNS)
        hasher.update(np.add.reduce(rows, axis=0).data)
    hasher.update(vector[whole:].view(np.uint8).data)
    return hasher.hexdigest()
