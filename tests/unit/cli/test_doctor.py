"""`ravnest doctor`: faults are found where they really are, and each finding says what to do."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from ravnest.run import doctor
from ravnest.run.doctor import Finding, judge_line, judge_memory, judge_nat, judge_skew
from tests.unit.coordinator.conftest import small_disk
from tests.unit.dashboard.served import served

__all__ = ["small_disk"]

RunCli = Callable[..., tuple[int, str, str]]
DISK_SIZE = "64k"
HERE, THERE = ("192.168.1.5", 5000), ("203.0.113.9", 5000)
command = import_module("ravnest.cli.doctor")


def quick(folder: Path) -> tuple[object, ...]:
    return "--quick", "--run-dir", folder, "--data-dir", folder


@pytest.mark.parametrize(
    ("finding", "state", "text"),
    [
        (judge_memory(10**10, 2 * 10**10), "ok", "10.0 GB of 20.0 GB"),
        (judge_memory(10**9, 2 * 10**10), "warning", "1.0 GB"),
        (judge_memory(10**8, 2 * 10**10), "problem", "100.0 MB"),
        (doctor.check_clock(1_800_000_000), "ok", "2027-01-15"),
        (doctor.check_clock(3600), "problem", "1970-01-01 .* is long past"),
        (judge_skew(0.2), "ok", "200 ms ahead of"),
        (judge_skew(-20.0), "warning", "20 s behind"),
        (judge_skew(-7300.0), "problem", "2.03 h behind"),
        (judge_nat([(HERE, HERE), (HERE, HERE)]), "ok", "no NAT"),
        (judge_nat([(HERE, THERE), (("192.168.1.5", 5001), ("203.0.113.9", 5001))]), "ok", "keeps ports"),
        (judge_nat([(HERE, ("203.0.113.9", 61)), (HERE, ("203.0.113.9", 62))]), "warning", "changes ports"),
        (judge_nat([(HERE, THERE), (HERE, ("203.0.113.10", 5000))]), "warning", "several public addresses"),
        (judge_line(1e7, 1e8, 0.02), "ok", "80 Mbit/s up, 800 Mbit/s down, 20 ms"),
        (judge_line(1e4, 1e8, 0.02), "warning", "80 kbit/s up"),
        (judge_line(1e7, 1e8, 0.7), "warning", "700 ms"),
    ],
)
def test_judgements(finding: Finding, state: str, text: str) -> None:
    assert finding.state == state, finding
    assert re.search(text, finding.text), finding
    assert bool(finding.remedy) == (state != "ok"), "a remedy for all that is not ok, and for nothing else"


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    good = doctor.check_disk(tmp_path / "runs" / "of" / "mine", "runs")
    assert (good.name, good.state in ("ok", "warning")) == ("disk for runs", True)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    (tmp_path / "file").write_text("")
    bad = doctor.check_disk(tmp_path / "file" / "runs", "runs")
    assert (bad.state, "cannot write to" in bad.text, "--run-dir" in bad.remedy) == ("problem", True, True), bad


def test_a_full_disk(small_disk: Path) -> None:
    found = doctor.check_disk(small_disk, "nodes")
    assert found.state == "problem"
    assert found.text == f"cannot write to {small_disk}: No space left on device"
    assert found.remedy.startswith("free some space, or choose another directory")


def test_a_port_in_use(run_cli: RunCli, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output, _ = run_cli(
            "doctor", "--quick", "--json", "--port", port, "--run-dir", tmp_path, "--data-dir", tmp_path
        )
    content = json.loads(output)
    assert (code, content["ok"]) == (1, False)
    (problem,) = [finding for finding in content["findings"] if finding["state"] == "problem"]
    assert (problem["name"], problem["text"]) == ("port", f"cannot listen at port {port}: Address already in use")
    names = [finding["name"] for finding in content["findings"]]
    assert names[:4] == ["python", "torch", "device", "memory"]
    assert "training" not in names
    code, output, _ = run_cli("doctor", "--port", 0, *quick(tmp_path))
    assert code == 0
    assert output.splitlines()[-1].startswith("this PC can train")


@pytest.mark.parametrize("is_known", [True, False])
def test_the_way_to_a_coordinator(is_known: bool, tmp_path: Path) -> None:
    async def test() -> list[Finding]:
        async with served(tmp_path, host="127.0.0.1", port=0, sockets=None) as server:
            ticket = server.service.ticket()
            if not is_known:
                server.service.coordinator.state.tokens.clear()
            return await asyncio.to_thread(lambda: list(command._check_coordinator(ticket)))

    found = asyncio.run(test())
    if is_known:
        assert [finding.name for finding in found] == ["coordinator", "clock skew", "NAT", "line"], found
        assert [finding.state for finding in found[:3]] == ["ok"] * 3, found
        assert "Mbit/s up" in found[3].text or "Gbit/s up" in found[3].text
    else:
        assert [(finding.name, finding.state) for finding in found] == [("coordinator", "problem")]
        assert "unknown token" in found[0].text


def test_a_coordinator_that_is_not_there(run_cli: RunCli, tmp_path: Path) -> None:
    for ticket in ("rav1-abc", "nothing"):
        code, output, _ = run_cli(
            "doctor", ticket, "--quick", "--port", 0, "--run-dir", tmp_path, "--data-dir", tmp_path
        )
        assert code == 1
        assert output.splitlines()[-1] == "1 problem: coordinator"


def test_a_training_that_does_not_end_leaves_no_process() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    found = doctor.check_training(timeout_s=1.0)
    assert (found.state, "within 1 s" in found.text) == ("problem", True), found
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("output", "errors", "code", "state", "text"),
    [
        (
            '{"type":"step","loss":2}\n{"type":"step","loss":1}\n{"type":"end","samples_per_s":9}',
            "",
            0,
            "ok",
            "2 steps",
        ),
        ('{"type":"step","loss":1}\n{"type":"step","loss":2}\n', "", 0, "problem", "the loss did not fall"),
        ("", "warning\nravnest: the disk is full\n", 2, "problem", "failed: the disk is full"),
        ("not json", "", 0, "problem", "exit code 0"),
    ],
)
def test_what_a_training_shows(output: str, errors: str, code: int, state: str, text: str) -> None:
    found = doctor._judge_training(output, errors, code, 3.0)
    assert (found.state, text in found.text) == (state, True), found


@pytest.mark.soak
def test_a_training_with_two_workers() -> None:
    found = doctor.check_training(timeout_s=170.0)
    assert found.state == "ok", found
    assert "the loss fell from" in found.text
