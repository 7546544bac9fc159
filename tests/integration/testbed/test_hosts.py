"""Limits of a host, its processes, and captures of its link."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed import Home, HostSpec, Testbed, Topology
from tests.integration.testbed.running import ask, receive, server, start

TOPOLOGY = Topology(
    homes=(Home(name="anna"),),
    hosts=(
        HostSpec(name="hub"),
        HostSpec(name="slow", cpu=0.25),
        HostSpec(name="small", memory_bytes=60_000_000),
        HostSpec(name="anna-1", home="anna"),
    ),
)


def test_cpu_quota(testbed: Testbed) -> None:
    assert receive(start(testbed, "slow", "spin", 0.3)) > 0.3 / 0.25 * 0.8
    assert 0.28 < testbed.usage("slow").cpu_s < 0.4


def test_memory_limit(testbed: Testbed) -> None:
    modest, greedy = (start(testbed, "small", "fill", num_bytes) for num_bytes in (10_000_000, 200_000_000))
    assert modest.wait(20) == 0
    assert greedy.wait(20) == -signal.SIGKILL
    assert 10_000_000 < testbed.usage("small").peak_memory_bytes <= 60_000_000


def test_a_process_runs_with_host_name_environment_and_folder(testbed: Testbed, tmp_path: Path) -> None:
    script = 'echo "$(uname -n) $WORD $(pwd)"; exit 3'
    process = testbed.hosts["anna-1"].run(["sh", "-c", script], {"WORD": "hello"}, tmp_path, stdout=subprocess.PIPE)
    assert process.communicate(timeout=10)[0] == f"anna-1 hello {tmp_path}\n"
    assert (process.returncode, process.host) == (3, "anna-1")


def test_each_host_has_its_own_unix_sockets(testbed: Testbed, tmp_path: Path) -> None:
    """Nodes on two hosts of a testbed use the network between them, although they share a file system."""
    code = "from ravnest.node.storage import host_sockets; print(host_sockets('ab' * 32))"
    command, environment = [sys.executable, "-c", code], {"XDG_RUNTIME_DIR": str(tmp_path)}
    shown = set()
    for name in ("hub", "anna-1", "hub"):
        process = testbed.hosts[name].run(command, environment, tmp_path, stdout=subprocess.PIPE)
        shown.add(process.communicate(timeout=60)[0])
    assert len(shown) == 2


def test_stop_and_resume(testbed: Testbed) -> None:
    echo_server = server(testbed, "hub")
    client = server(testbed, "anna-1", "ask", "hub")
    for target in (echo_server, "hub"):
        testbed.stop(target)
        assert ask(client, 0.2) is None
        testbed.resume(target)
        assert ask(client, 5) is not None
    testbed.kill("hub")
    assert echo_server.wait(5) == -signal.SIGKILL


def test_killing_a_host_kills_processes_that_have_just_started(testbed: Testbed) -> None:
    started = [testbed.hosts["hub"].run(["sleep", "100"]) for _ in range(5)]
    testbed.kill("hub")
    assert [process.wait(5) for process in started] == [-signal.SIGKILL] * 5


def test_a_capture_records_the_packets_of_its_host(testbed: Testbed) -> None:
    receiver = server(testbed, "hub", "receive", 0)
    with testbed.capture("anna-1") as wire, testbed.capture("slow") as elsewhere:
        start(testbed, "anna-1", "send", "hub", 3_000_000)
        receive(receiver)
    assert wire.num_missed == 0
    assert wire.bytes().count(bytes(1000)) >= 2900
    assert bytes(1000) not in elsewhere.bytes()


def test_testbeds_are_isolated_from_each_other(testbed: Testbed, make_testbed: Callable[[Topology], Testbed]) -> None:
    other = make_testbed(TOPOLOGY)
    server(other, "hub")
    assert other.address("hub") == testbed.address("hub")
    assert receive(start(testbed, "anna-1", "dial", "hub", 5)) == "ConnectionRefusedError"
    assert receive(start(other, "anna-1", "dial", "hub", 5)) == "connected"


def test_a_testbed_works_only_inside_its_with_block() -> None:
    with pytest.raises(ValueError, match="not running"):
        Testbed(TOPOLOGY).usage("hub")
