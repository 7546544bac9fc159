"""`ravnest train` and `ravnest join` as a user sees them: in a terminal, in a pipe, quiet, as JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.unit.cli.terminal import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

JOB = """
import time, torch, ravnest
from torch import nn
torch.manual_seed(0)
batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]
class Slow:
    def __iter__(self):
        for batch in batches:
            time.sleep(0.02)
            yield batch
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
job = ravnest.Job(model=model, loss=nn.functional.mse_loss, data=Slow(), validation=batches[:1])
"""


def command(folder: Path, *args: str) -> list[str]:
    (folder / "job.py").write_text(JOB)
    run = ["--threads", "1", "--run-dir", str(folder / "run")]
    return [sys.executable, "-m", "ravnest", "train", str(folder / "job.py"), *run, *args]


def test_ctrl_c_leaves_a_clean_screen_and_a_model(tmp_path: Path) -> None:
    with Terminal(command(tmp_path, "--local", "2", "--steps", "100000"), 60, 20) as terminal:
        text = terminal.wait_for(lambda text: "loss " in text and " left" in text, "training")
        assert "of 100,000 steps" in text
        assert "node-0" in text
        assert "node-1" in text
        assert "the data ended after 3 batches and start over" in text
        assert not terminal.is_cursor_visible()
        terminal.signal(signal.SIGINT)
        assert terminal.finish() == 0
        lines = terminal.text.splitlines()
        assert terminal.is_cursor_visible()
        assert not any("of 100,000 steps" in line for line in lines)
        assert max(map(len, lines)) <= 60
        assert lines[terminal.screen.cursor.y - 1].endswith("run"), "the path of the run is the last line"
        assert terminal.output.decode().count("start over") == 1, "once"
    assert load_file(tmp_path / "run" / "model.safetensors")


def test_lines_of_json(tmp_path: Path) -> None:
    options = ("--local", "1", "--steps", "4", "--validate-every", "2", "--log-json")
    done = subprocess.run(command(tmp_path, *options), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line["time"] > 1e9 for line in lines)
    found: dict[str, list[dict[str, object]]] = {}
    for line in lines:
        found.setdefault(line["type"], []).append(line)
    assert set(found) >= {"dashboard", "plan", "step", "evaluation", "message", "end"}
    assert [line["step"] for line in found["step"]] == [1, 2, 3, 4]
    assert set(found["step"][0]) == {"type", "time", "step", "loss", "values", "samples", "samples_per_s"}
    assert [line["step"] for line in found["evaluation"]] == [2, 4]
    assert set(found["end"][0]) == {"type", "time", "steps", "loss", "samples_per_s", "run_dir", "after"}
    assert (found["end"][0]["steps"], found["end"][0]["run_dir"]) == (4, str(tmp_path / "run"))
    assert lines[-1] == found["end"][0]
