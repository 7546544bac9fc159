"""What is written is still there after a crash."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["sync_directory"]


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk, where the system can: else a crash may undo a rename."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
