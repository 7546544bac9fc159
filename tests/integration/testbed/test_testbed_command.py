"""`python -m testbed`, run as a command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.testbed.test_topology import EXAMPLE

FILE = """
[[host]]
name = "a"
[[host]]
name = "bb"
command = "sh -c 'echo my own; exec sleep 100'"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(FILE)
    return path


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "testbed", *map(str, args)]


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=60)


@pytest.mark.usefixtures("machine")
def test_commands_on_hosts(file: Path) -> None:
    faults = ("--kill", "bb after 300ms", "--cut", "a 100ms after 100ms")
    done = run(file, *faults, "--", "sh", "-c", "echo {name} at {address}; echo problem >&2; printf end")
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("a ")] == ["a  | a at 198.18.0.1", "a  | problem", "a  | end"]
    assert "bb | my own" in lines
    notes = [line.strip(" *") for line in lines if line.startswith("   *")]
    assert notes[:1] == ["a exited with code 0"] or "cut a at 100 ms" in notes[:1]
    assert [note for note in notes if not note.startswith("a ")] == [
        "cut a at 100 ms", "restore a at 200 ms", "kill bb at 300 ms", "bb was killed by SIGKILL",
    ]  # fmt: skip
    assert done.returncode == 1  # one of them failed


@pytest.mark.usefixtures("machine")
def test_one_host_and_a_duration(file: Path) -> None:
    done = run(file, "--host", "bb", "--duration", "200 ms", "--", "sh", "-c", "echo once; exec sleep 100")
    assert "bb | once" in done.stdout
    assert "stopping after 200 ms" in done.stdout
    assert "a  |" not in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lets_the_commands_exit(file: Path, number: signal.Signals) -> None:
    script = "trap 'echo goodbye; exit 0' INT; echo here; while :; do sleep 0.05; done"
    arguments = command(file, "--host", "a", "--", "sh", "-c", script)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        first = {process.stdout.readline(), process.stdout.readline()}
        process.send_signal(number)
        rest = process.stdout.read()
    assert first == {"a  | here\n", "bb | my own\n"}
    assert "a  | goodbye" in rest
    assert "a exited with code 0" in rest
    assert process.returncode == 0


def test_check_shows_the_hosts() -> None:
    done = run(EXAMPLE, "--check")
    code, printed = done.returncode, done.stdout
    words = "anna-1 anna 192.168.1.11 198.18.0.1 20 Mbit/s 20 Mbit/s 40 ms 0.5 1.0 GB"
    assert words in [" ".join(line.split()) for line in printed.splitlines()]
    assert code == (0 if "this machine can run a testbed" in printed else 2)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "name a topology file"),
        (["none.toml", "--", "ls"], "none.toml cannot be read"),
        ([EXAMPLE], "there is nothing to run"),
        ([EXAMPLE, "--host", "carl", "--", "ls"], "there is no host 'carl'; there are hub, anna-1"),
        ([EXAMPLE, "--cut", "anna-1", "--", "ls"], 'write it like "anna-1 5s after 10s"'),
        ([EXAMPLE, "--duration", "long", "--", "ls"], "'long' is not a time"),
    ],
)
def test_invalid_arguments_are_rejected_with_one_sentence(args: list[object], sentence: str) -> None:
    done = run(*args)
    assert sentence in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_without_root_the_error_names_what_is_missing() -> None:
    unprivileged = [] if os.getuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    done = subprocess.run([*unprivileged, *command(EXAMPLE, "--", "ls")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "it lacks new namespaces (root): Operation not permitted; TUN devices" in done.stderr
    assert done.stderr.count("\n") == 1
