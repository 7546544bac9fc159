"""`ravnest profile` as a user runs it, at both ends of a line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ravnest.planner.node_file import read_nodes

pytestmark = pytest.mark.slow

JOB = """
import ravnest, torch
data = [(torch.zeros(8, 16), torch.zeros(8, 4))]
job = ravnest.Job(model=lambda: torch.nn.Linear(16, 4), loss=torch.nn.functional.mse_loss, data=data)
"""


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, run_cli: Run, tmp_path: Path) -> Run:
    """`ravnest profile` in a directory with a job file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    return partial(run_cli, "profile")


def test_two_ends_of_a_line(profile: Run) -> None:
    serve = [sys.executable, "-m", "ravnest", "profile", "--serve", "127.0.0.1:0"]
    serving = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        found = re.search(r"serving at port (\d+)", serving.stdout.readline())
        assert found is not None
        limits = ("--memory", "1GB", "--threads", "1", "--max-upload", "40 Mbit/s", "--name", "attic")
        code, printed, errors = profile("job.py", "--json", "--peer", f"127.0.0.1:{found[1]}", *limits)
    finally:
        serving.send_signal(signal.SIGINT)
        serving.communicate(timeout=60)
    assert (code, serving.returncode) == (0, 130), errors
    assert "measuring: upload to 127.0.0.1" in errors
    answer = json.loads(printed)
    assert (answer["name"], answer["memory_bytes"], answer["threads"]) == ("attic", 10**9, 1)
    assert answer["measured_on"] == "the job's own program"
    assert 0 < answer["line"]["up_bytes_per_s"] <= 5e6


def test_a_table_and_lines_for_the_node_file(profile: Run, tmp_path: Path) -> None:
    code, printed, errors = profile("job.py", "--memory", "1GB", "--name", "attic")
    assert code == 0, errors
    assert "GFLOP/s, on the job's own program" in printed
    (tmp_path / "nodes.toml").write_text(printed[printed.index("[[node]]") :])
    assert [m.name for m in read_nodes(tmp_path / "nodes.toml").machines] == ["attic"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--memory", "lots"], "is not a size"),
        (["--memory", "1000TB"], "memory must be <= .*, got 1000.0 TB"),
        (["--memory", "1MB"], "memory must be >= 400.0 MB"),
        (["--threads", "0"], "threads must be >= 1"),
        (["--threads", "4000"], "threads must be <= .*, got 4000"),
        (["--max-upload", "20"], "is not a rate"),
        (["--peer", "attic"], "not an address"),
        (["--peer", "127.0.0.1:1"], "cannot reach"),
        (["--peer", "a:1", "--serve", ":1"], "not both"),
        (["--serve", ":99999"], "up to 65535"),
        (["--name", "My PC"], "not a valid name"),
        (["nothing.py"], "does not exist or is not a file"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(args: list[str], message: str, profile: Run) -> None:
    code, _, errors = profile(*args)
    assert code == 2
    assert "Traceback" not in errors
    assert re.search(message, errors), errors
