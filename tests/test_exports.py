"""The names we promise, and the commands and flags: a change here is a change for users."""

from __future__ import annotations

import subprocess
import sys

import typer

import ravnest
import ravnest.graph
from ravnest.cli import app


def test_exported_names() -> None:
    assert sorted(ravnest.__all__) == [
        "Adam", "AdamW", "Correction", "CutError", "Job", "Muon", "NAdam", "NotFinite", "Optimizer", "ProgramError",
        "RavnestError", "Run", "SGD", "TraceError", "Training", "UnsupportedOp", "WeightsError", "WorkerLost",
        "__version__", "constant", "cosine", "delay_compensation", "linear", "look_ahead", "lr_discount", "none",
    ]  # fmt: skip
    for module in (ravnest, ravnest.graph):
        assert all(getattr(module, name) is not None for name in module.__all__)
        assert len(set(module.__all__)) == len(module.__all__)


def test_names_are_found_where_they_live() -> None:
    assert sorted(ravnest.graph._HOME_OF) == sorted(ravnest.graph.__all__)
    assert set(ravnest._HOME_OF) < set(ravnest.__all__)


def test_commands_and_flags() -> None:
    command = typer.main.get_command(app)
    flags = {
        name: sorted(flag for p in sub.params for flag in p.opts)
        for name, sub in command.commands.items()  # type: ignore[attr-defined]
    }
    assert flags == {
        "demo": ["--debug", "--folder", "--nodes", "--seed", "--steps"],
        "export": ["--debug", "--job", "--to", "run"],
        "join": ["--data-dir", "--debug", "--max-upload", "--memory", "--name", "--port", "--threads", "ticket"],
        "kick": ["--debug", "--reason", "--run", "node"],
        "plan": [
            "--accumulate", "--compression", "--debug", "--json", "--max-staleness", "--microbatch", "--nodes",
            "--recompute", "--seed", "--simulate", "--spares", "--trace", "--whole", "job",
        ],
        "profile": [
            "--debug", "--json", "--max-upload", "--memory", "--name", "--peer", "--serve", "--threads", "job",
        ],
        "status": ["--debug", "--json", "--watch", "what"],
        "testbed": [
            "--check", "--clean", "--cut", "--debug", "--duration", "--host", "--kill", "--stop", "command", "topology",
        ],
        "ticket": ["--debug", "--run", "--uses", "--valid"],
        "train": [
            "--accumulate", "--advertise", "--autocast", "--average-every", "--checkpoint-every", "--checkpoint-to",
            "--codec", "--compression", "--coordinator", "--cores", "--debug", "--epochs", "--folder",
            "--keep-checkpoints", "--listen", "--local", "--max-staleness", "--memory", "--microbatch", "--min-nodes",
            "--min-stages", "--mode", "--outer", "--recompute", "--replicas", "--resume", "--seed", "--spares",
            "--speeds", "--steps", "--threads", "--ticket-uses", "--ticket-valid", "--validate-every", "--wait",
            "--whole", "job",
        ],
    }  # fmt: skip


def ravnest_command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ravnest", *args], capture_output=True, text=True, timeout=120)


def test_version_and_help() -> None:
    assert ravnest_command("--version").stdout.strip() == f"ravnest {ravnest.__version__}"
    assert "demo" in ravnest_command("--help").stdout
    assert "Example" in ravnest_command("demo", "--help").stdout


def test_a_wrong_flag_is_a_sentence() -> None:
    done = ravnest_command("demo", "--nodes", "99")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
