"""Installs the test accelerator for other processes, as a package of a hardware maker would be: by an entry point.

with installed(tmp_path, devices=2, memory_bytes=50_000_000):
    subprocess.run([sys.executable, "-m", "ravnest", "profile", "--device", "testacc:1"])
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ravnest

__all__ = ["install"]

_ROOT = Path(__file__).parents[2]


def install(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    devices: int = 1,
    memory_bytes: int | None = None,
    bf16: bool = True,
) -> None:
    """Let processes that start from now on find the accelerator when they import torch."""
    package = directory / "testacc-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: testacc\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\ntestacc = tests.accelerator.backend:register\n")
    source = Path(str(ravnest.__file__)).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{directory}:{_ROOT}:{source}")
    monkeypatch.setenv("TESTACC_DEVICES", str(devices))
    monkeypatch.setenv("TESTACC_BF16", "1" if bf16 else "0")
    if memory_bytes is not None:
        monkeypatch.setenv("TESTACC_MEMORY", str(memory_bytes))
