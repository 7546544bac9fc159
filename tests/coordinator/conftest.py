"""A disk that is soon full, of the size that a file of tests asks for with `DISK_SIZE`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a small disk takes root to mount")
    size = f"size={request.module.DISK_SIZE}"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.decode()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
