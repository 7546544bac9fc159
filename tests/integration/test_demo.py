"""`ravnest demo`, shortened: every act happens, and every batch is accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ravnest.cli.demo_acts import ACTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_all_acts_happen(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ravnest", "demo", "--steps", "24", "--no-browser", "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"[{i}/{len(ACTS)}]" in done.stdout for i in range(1, len(ACTS) + 1)] == [True] * len(ACTS)
    assert "each exactly once" in done.stdout
    assert "one synchronous process:" in done.stdout
    assert "http://127.0.0.1:" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    members = {line["cluster"] for line in lines if "step" in line}
    assert len(members) >= 4  # two at first, the repaired one, and those with the new node
    assert (tmp_path / "run" / "model.safetensors").is_file()
