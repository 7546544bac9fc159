"""Freed memory stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, resource, sys
import torch
from ravnest.worker.process import keep_freed_memory
ctypes.CDLL(None).mallopt(-3, 2**16)  # return every larger block at once, as an allocator may
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [torch.ones(2**18) for _ in range(8)]  # a megabyte each, as activations are
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_freed_memory_is_reused_without_page_faults() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, timeout=120)
        assert not done.returncode, done.stderr
        return int(done.stdout)

    assert faults("keep") < faults("not") / 4  # of 20 * 8 * 256 pages; some faults happen in any case
