"""`ravnest testbed` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testbed.test_topology import EXAMPLE

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
    return [sys.executable, "-m", "ravnest", "testbed", *map(str, args)]


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=60)


@pytest.mark.usefixtures("machine")
def test_commands_on_hosts(file: Path) -> None:
    faults = ("--kill", "bb after 300ms", "--cut", "a 100ms after 100ms")
    done = run(file, *faults, "--", "sh", "-c", "echo {name} at {address}; echo problem >&2; printf end")
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("a ")] == ["a  | a at 198.18.0.1", "a  | problem", "a  | end"]
    assert "bb | my own" in lines
    said = [line.strip(" *") for line in lines if line.startswith("   *")]
    assert said[:1] == ["a ended with code 0"] or "cut a at 100 ms" in said[:1]
    assert [word for word in said if not word.startswith("a ")] == [
        "cut a at 100 ms", "restore a at 200 ms", "kill bb at 300 ms", "bb was ended by SIGKILL",
    ]  # fmt: skip
    assert done.returncode == 1  # one of them did not end well


@pytest.mark.usefixtures("machine")
def test_only_one_host_and_only_for_a_while(file: Path) -> None:
    done = run(file, "--host", "bb", "--duration", "200 ms", "--", "sh", "-c", "echo once; exec sleep 100")
    assert "bb | once" in done.stdout
    assert "200 ms are over" in done.stdout
    assert "a  |" not in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_lets_the_commands_end(file: Path, how: signal.Signals) -> None:
    script = "trap 'echo goodbye; exit 0' INT; echo here; while :; do sleep 0.05; done"
    asked = command(file, "--host", "a", "--", "sh", "-c", script)
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        first = {process.stdout.readline(), process.stdout.readline()}
        process.send_signal(how)
        rest = process.stdout.read()
    assert first == {"a  | here\n", "bb | my own\n"}
    assert "a  | goodbye" in rest
    assert "a ended with code 0" in rest
    assert process.returncode == 0


Said = Callable[..., tuple[int, str, str]]


def test_check_shows_the_hosts(said: Said) -> None:
    code, printed, _ = said("testbed", EXAMPLE, "--check")
    words = "anna-1 anna 192.168.1.11 198.18.0.1 20 Mbit/s 20 Mbit/s 40 ms 0.5 1.0 GB"
    assert words in [" ".join(line.split()) for line in printed.splitlines()]
    assert code == (0 if "this machine has all that a testbed needs" in printed else 2)


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
def test_mistakes_are_sentences(said: Said, args: list[object], sentence: str) -> None:
    code, _, error = said("testbed", *args)
    assert sentence in error
    assert (code, error.count("\n")) == (2, 1)


def test_without_root_it_says_what_it_lacks() -> None:
    powerless = [] if os.getuid() else ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    done = subprocess.run([*powerless, *command(EXAMPLE, "--", "ls")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "it lacks new namespaces (root): Operation not permitted; TUN devices" in done.stderr
    assert done.stderr.count("\n") == 1
