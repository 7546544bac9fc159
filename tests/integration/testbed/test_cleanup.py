"""A testbed leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from testbed import Host, HostSpec, Testbed, Topology
from testbed.cleanup import clean
from testbed.groups import roots
from tests.integration.testbed.running import PROGRAMS, receive, start

TOPOLOGY = Topology(hosts=(HostSpec(name="a", cpu=0.5, memory_bytes=100_000_000), HostSpec(name="b")))
OWNER = f"""
import json, subprocess, sys
from testbed import HostSpec, Testbed, Topology
with Testbed(Topology(hosts=(HostSpec(name="a"), HostSpec(name="b")))) as testbed:
    command = [sys.executable, "-I", "-S", {str(PROGRAMS)!r}, "wait"]
    started = [host.run(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for host in testbed.hosts.values()]
    pids = [pid for process in started for pid in json.loads(process.stdout.readline())]
    print(json.dumps([testbed.name, testbed.forwarder_pid, pids]), flush=True)
    sys.stdin.read()
"""

pytestmark = pytest.mark.usefixtures("machine")


def groups_of(name: str) -> list[Path]:
    return [root.folder / name for root in roots().values() if (root.folder / name).exists()]


def await_end(pid: int, timeout_s: float = 10.0) -> None:
    """Wait until a process is gone."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([watched], [], [], timeout_s)
    os.close(watched)
    assert ended, f"process {pid} is still alive"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def network_of(host: Host) -> str:
    return os.readlink(host.network)


def networks() -> set[str]:
    """All network namespaces that any process is in or holds open."""
    namespaces = set()
    for link in [*Path("/proc").glob("[0-9]*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")]:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("net:"):
            namespaces.add(target)
    return namespaces


def test_leaving_the_block_removes_everything() -> None:
    with suppress(ZeroDivisionError), Testbed(TOPOLOGY) as testbed:
        waiting = start(testbed, "a", "wait")
        pids = [*receive(waiting), testbed.forwarder_pid]
        assert len(groups_of(testbed.name)) == len(roots())
        inside = {network_of(host) for host in testbed.hosts.values()}
        assert inside < networks()
        _ = 1 / 0
    assert not groups_of(testbed.name)
    assert not inside & networks()
    for pid in pids:
        await_end(pid)
    assert waiting.returncode == -signal.SIGKILL


@pytest.fixture
def owner() -> Any:
    """A process that owns a testbed, the testbed's name, its forwarder's pid and the pids on its hosts."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, *json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_owner_leaves_nothing(owner: Any, number: signal.Signals) -> None:
    process, name, forwarder, pids = owner
    assert groups_of(name)
    process.send_signal(number)
    for pid in (process.pid, forwarder, *pids):
        await_end(pid)
    assert not groups_of(name)


def test_clean_after_owner_and_forwarder_were_killed(owner: Any) -> None:
    process, name, forwarder, pids = owner
    assert not any(name in sentence for sentence in clean())  # its owner is alive
    assert all(map(is_alive, pids))
    os.kill(forwarder, signal.SIGKILL)
    process.kill()
    process.wait()
    assert all(map(is_alive, pids))
    assert groups_of(name)
    assert f"{name}: killed {len(pids)} processes and removed its control groups" in clean()
    assert not any(map(is_alive, pids))
    assert not groups_of(name)
    assert not any(name in sentence for sentence in clean())
