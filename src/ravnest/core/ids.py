"""Valid names of nodes, clusters and runs: short, lower-case, safe in file names and logs."""

from __future__ import annotations

import re

__all__ = ["COORDINATOR", "check_id"]

COORDINATOR = "coordinator"  # the name in the coordinator's certificate, and of it as a peer

_VALID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def check_id(text: str) -> str:
    """Return `text` if it is a valid name, else raise `ValueError`."""
    if not _VALID.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a valid name: use 1 to 63 of a-z, 0-9, '-' and '_', starting with a letter or digit"
        )
    return text
