"""Nothing stays behind, however the end comes."""

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

from ravnest.testbed import Host, HostSpec, Testbed, Topology
from ravnest.testbed.groups import roots
from ravnest.testbed.leftovers import clean
from tests.testbed.running import PROGRAMS, heard, start

TOPOLOGY = Topology(hosts=(HostSpec(name="a", cpu=0.5, memory_bytes=100_000_000), HostSpec(name="b")))
OWNER = f"""
import json, subprocess, sys
from ravnest.testbed import HostSpec, Testbed, Topology
with Testbed(Topology(hosts=(HostSpec(name="a"), HostSpec(name="b")))) as bed:
    command = [sys.executable, "-I", "-S", {str(PROGRAMS)!r}, "wait"]
    started = [host.run(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for host in bed.hosts.values()]
    pids = [pid for process in started for pid in json.loads(process.stdout.readline())]
    print(json.dumps([bed.name, bed.forwarder_pid, pids]), flush=True)
    sys.stdin.read()
"""

pytestmark = pytest.mark.usefixtures("machine")


def groups_of(bed: str) -> list[Path]:
    return [root.folder / bed for root in roots().values() if (root.folder / bed).exists()]


def await_end(pid: int, timeout_s: float = 10.0) -> None:
    """Until a process is gone."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([watched], [], [], timeout_s)
    os.close(watched)
    assert ended, f"process {pid} lives on"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def network_of(host: Host) -> str:
    return os.readlink(host.network)


def networks() -> set[str]:
    """All network namespaces that any process is in or holds open."""
    found = set()
    for link in [*Path("/proc").glob("[0-9]*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")]:
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("net:"):
            found.add(target)
    return found


def test_leaving_the_block() -> None:
    with suppress(ZeroDivisionError), Testbed(TOPOLOGY) as bed:
        waiting = start(bed, "a", "wait")
        pids = [*heard(waiting), bed.forwarder_pid]
        assert len(groups_of(bed.name)) == len(roots())
        inside = {network_of(host) for host in bed.hosts.values()}
        assert inside < networks()
        _ = 1 / 0
    assert not groups_of(bed.name)
    assert not inside & networks()
    for pid in pids:
        await_end(pid)
    assert waiting.returncode == -signal.SIGKILL


@pytest.fixture
def owner() -> Any:
    """A process that owns a bed, the name of the bed, its forwarder, and what runs on its hosts."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, *json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_owner_leaves_nothing(owner: Any, how: signal.Signals) -> None:
    process, bed, forwarder, pids = owner
    assert groups_of(bed)
    process.send_signal(how)
    for pid in (process.pid, forwarder, *pids):
        await_end(pid)
    assert not groups_of(bed)


def test_clean_after_owner_and_forwarder_were_killed(owner: Any) -> None:
    process, bed, forwarder, pids = owner
    assert not any(bed in sentence for sentence in clean())  # it has an owner
    assert all(map(is_alive, pids))
    os.kill(forwarder, signal.SIGKILL)
    process.kill()
    process.wait()
    assert all(map(is_alive, pids))
    assert groups_of(bed)
    assert f"{bed}: ended {len(pids)} processes and removed its control groups" in clean()
    assert not any(map(is_alive, pids))
    assert not groups_of(bed)
    assert not any(bed in sentence for sentence in clean())
