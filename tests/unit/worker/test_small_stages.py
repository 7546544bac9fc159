"""Small parts of an agent: backoff, addresses, console, storage, outbox."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.core.clock import Backoff
from ravnest.core.metrics import StageMetrics
from ravnest.node.console import AgentConsole, joined
from ravnest.node.session import Outbox
from ravnest.node.storage import NodeStorage, node_directory
from ravnest.protocol.commands import LinkReport, LossReport, StageFailed, StageReady, StepReport
from ravnest.protocol.control import Assignment, Blob, Heartbeat, NodeProfile, StageReport
from ravnest.protocol.peer import PeerAddresses
from ravnest.transport.address import check_address
from ravnest.worker.remote_peers import choose_addresses, is_loopback
from tests.unit.core.manual_clock import ManualClock

ASSIGNMENT = Assignment(generation=2, cluster="c1", stage=1, count=3, file=Blob("", 0), config=Blob("", 0))


@given(st.integers(0, 2**32), st.integers(1, 20))
def test_backoff_doubles_up_to_a_limit_and_resets(seed: int, count: int) -> None:
    backoff = Backoff(0.5, 30.0, random.Random(seed))
    for number in range(count):
        full_s = min(30.0, 0.5 * 2**number)
        assert full_s / 2 <= backoff.next_s() <= full_s
    backoff.reset()
    assert backoff.next_s() <= 0.5


@given(st.lists(st.ip_addresses().map(str)), st.booleans(), st.booleans())
def test_only_usable_addresses_are_chosen(hosts: list[str], is_local: bool, ipv6: bool) -> None:
    chosen = choose_addresses(hosts, 7, is_local=is_local, ipv6=ipv6)
    assert {host for host, _ in chosen} <= set(hosts)
    assert PeerAddresses(addresses=chosen).addresses == chosen
    assert all(check_address(address) for address in chosen)
    assert ipv6 or not any(":" in host for host, _ in chosen)


@pytest.mark.parametrize(
    ("hosts", "is_local", "expected"),
    [
        (["127.0.0.1", "192.168.1.5", "fe80::1%eth0", "169.254.1.1"], False, ["192.168.1.5"]),
        (["127.0.0.1", "192.168.1.5"], True, ["127.0.0.1", "192.168.1.5"]),
        (["127.0.0.1", "::1"], False, ["127.0.0.1", "::1"]),  # nothing else
        (["192.168.1.5", "192.168.1.5", "2001:db8::1"], False, ["192.168.1.5", "2001:db8::1"]),
    ],
)
def test_loopback_is_chosen_only_where_it_is_useful(hosts: list[str], is_local: bool, expected: list[str]) -> None:
    assert [host for host, _ in choose_addresses(hosts, 7, is_local=is_local, ipv6=True)] == expected


def test_is_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"))
    assert not any(is_loopback(host) for host in ("192.0.2.1", "example.org"))


def test_the_console_prints_each_change_once() -> None:
    lines: list[str] = []
    clock = ManualClock()
    console = AgentConsole(lines.append, clock)
    console.log("measuring this PC")
    console.log("measuring this PC")
    console.assigned(ASSIGNMENT, "there is work")
    for report in (
        LinkReport("anna", "punched", "punched: dialled 192.0.2.1:7", "forward a port"), StageReady(1), LossReport({0:
        (1.0,)}),
    ):  # fmt: skip
        console.reported(StageReport(2, report))
    for updates in range(1, 26):
        console.reported(StageReport(2, StepReport(StageMetrics(stage=1, updates=updates, microbatches=8 * updates))))
        clock.advance(1.0)
    console.reported(StageReport(1, StageFailed("of an older generation")))
    console.reported(StageReport(2, StageFailed("out of memory")))
    console.assigned(None, "cluster c1 ended")
    assert lines == [
        "measuring this PC",
        "stage 1 of 3 in cluster c1: loading",
        "link to anna: punched: dialled 192.0.2.1:7; forward a port",
        "stage 1 of 3 in cluster c1: ready",
        "training: 1 update",
        "training: 11 updates, 8 microbatches/s",
        "training: 21 updates, 8 microbatches/s",
        "stage 1 of 3 in cluster c1: failed: out of memory",
        "free: cluster c1 ended",
    ]
    assert console.activity == "free: cluster c1 ended"


def test_the_activity_of_a_waiting_node_counts_down() -> None:
    lines: list[str] = []
    clock = ManualClock()
    console = AgentConsole(lines.append, clock)
    console.waiting("waits for 2 more nodes", None)
    assert console.activity == "waits for 2 more nodes"
    console.waiting("waits for more nodes: training begins", 8.0)
    clock.advance(3.0)
    assert console.activity == "waits for more nodes: training begins within 5 s"
    clock.advance(30.0)
    console.note("2 agents share this PC")
    assert console.activity == "waits for more nodes: training begins within 0 s"
    console.log("loading")
    assert console.activity == "loading"
    assert lines[1:3] == ["waits for more nodes: training begins within 8 s", "2 agents share this PC"]


def test_the_line_about_joining() -> None:
    profile = NodeProfile(memory_bytes=4 * 10**9, gflops=38.04, up_bytes_per_s=2.5e6)
    assert joined("attic", profile) == "joined as attic: 4.0 GB, 38 GFLOP/s, 20 Mbit/s up"


def test_storage_keeps_the_port_and_removes_stage_files(tmp_path: Path) -> None:
    home = NodeStorage(node_directory(tmp_path, "ab" * 32, "attic"))
    assert home.directory.name == "abababab-attic"
    with home.held():
        assert home.port == 0
        home.port = 7711
        (home.stage_files(3) / "stage").write_bytes(b"x")
    again = NodeStorage(node_directory(tmp_path, "ab" * 32, "attic"))
    assert again.port == 7711
    assert sorted(path.name for path in again.directory.iterdir()) == ["lock", "port", "worker.log"]
    with again.held():
        (again.directory / "port").write_text("nonsense")
        assert again.port == 0


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 10))
def test_an_outbox_keeps_the_newest_in_order(numbers: list[int], capacity: int) -> None:
    async def drain() -> list[str]:
        outbox = Outbox(capacity)
        for number in numbers:
            outbox.put(Heartbeat(str(number)))
        sent = []
        while len(outbox):
            first = await outbox.first()
            assert await outbox.first() is first  # until it is dropped
            outbox.drop(first)
            assert isinstance(first, Heartbeat)
            sent.append(first.activity)
        return sent

    assert asyncio.run(drain()) == [str(number) for number in numbers][-capacity:]
