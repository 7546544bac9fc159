"""Names of things: plain strings with distinct types, so that a node is never passed for a run.

An id is short, lower-case and safe in file names and logs. Random ones are drawn from a generator
that is passed in, so that a seeded run names its things the same way again.
"""

from __future__ import annotations

import random
import re
from typing import NewType

__all__ = ["ClusterId", "NodeId", "RunId", "check_id", "new_id"]

NodeId = NewType("NodeId", str)
ClusterId = NewType("ClusterId", str)
RunId = NewType("RunId", str)

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # no 0/o, 1/l: ids are read aloud
_VALID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def new_id(prefix: str, rng: random.Random, length: int = 8) -> str:
    """A fresh id such as `node-k3v9x2ab`; 8 letters give 2**40 names."""
    return check_id(prefix + "-" + "".join(rng.choice(_ALPHABET) for _ in range(length)))


def check_id(text: str) -> str:
    """Return `text` if it may name something, else say what a name looks like."""
    if not _VALID.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a valid name: use 1 to 63 of a-z, 0-9, '-' and '_', starting with a letter or digit"
        )
    return text
