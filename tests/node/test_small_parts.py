"""What an agent is made of: waiting, saying, keeping, and knowing its own addresses."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.core.clock import ManualClock
from ravnest.core.control import Beat, Blob, NodeProfile, Part, Report, Whereabouts
from ravnest.core.metrics import StageMetrics
from ravnest.core.orders import Failed, Linked, Lost, Ready, Updated
from ravnest.net.addresses import check_address
from ravnest.node.backoff import Backoff
from ravnest.node.home import Home
from ravnest.node.say import Speaker, joined
from ravnest.node.session import Outbox
from ravnest.node.whereabouts import choose_addresses, is_loopback

PART = Part(generation=2, cluster="c1", stage=1, count=3, file=Blob("", 0), brief=Blob("", 0))


@given(st.integers(0, 2**32), st.integers(1, 20))
def test_waits_double_up_to_a_limit_and_begin_anew(seed: int, count: int) -> None:
    backoff = Backoff(0.5, 30.0, random.Random(seed))
    for number in range(count):
        full_s = min(30.0, 0.5 * 2**number)
        assert full_s / 2 <= backoff.next_s() <= full_s
    backoff.reset()
    assert backoff.next_s() <= 0.5


@given(st.lists(st.ip_addresses().map(str)), st.booleans(), st.booleans())
def test_addresses_are_such_as_peers_can_use(hosts: list[str], near_home: bool, ipv6: bool) -> None:
    chosen = choose_addresses(hosts, 7, near_home=near_home, ipv6=ipv6)
    assert {host for host, _ in chosen} <= set(hosts)
    assert Whereabouts(addresses=chosen).addresses == chosen
    assert all(check_address(address) for address in chosen)
    assert ipv6 or not any(":" in host for host, _ in chosen)


@pytest.mark.parametrize(
    ("hosts", "near_home", "expected"),
    [
        (["127.0.0.1", "192.168.1.5", "fe80::1%eth0", "169.254.1.1"], False, ["192.168.1.5"]),
        (["127.0.0.1", "192.168.1.5"], True, ["127.0.0.1", "192.168.1.5"]),
        (["127.0.0.1", "::1"], False, ["127.0.0.1", "::1"]),  # nothing else
        (["192.168.1.5", "192.168.1.5", "2001:db8::1"], False, ["192.168.1.5", "2001:db8::1"]),
    ],
)
def test_loopback_only_where_it_is_of_use(hosts: list[str], near_home: bool, expected: list[str]) -> None:
    assert [host for host, _ in choose_addresses(hosts, 7, near_home=near_home, ipv6=True)] == expected


def test_what_loopback_is() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"))
    assert not any(is_loopback(host) for host in ("192.0.2.1", "example.org"))


def test_a_line_for_each_change() -> None:
    lines: list[str] = []
    clock = ManualClock()
    speaker = Speaker(lines.append, clock)
    speaker.say("measuring this PC")
    speaker.say("measuring this PC")
    speaker.desired(PART, "there is work")
    for report in (
        Linked("anna", "punched", "punched: dialled 192.0.2.1:7", "forward a port"), Ready(1), Lost({0: (1.0,)}),
    ):  # fmt: skip
        speaker.reported(Report(2, report))
    for updates in range(1, 26):
        speaker.reported(Report(2, Updated(StageMetrics(stage=1, updates=updates, microbatches=8 * updates))))
        clock.advance(1.0)
    speaker.reported(Report(1, Failed("of an older part")))
    speaker.reported(Report(2, Failed("out of memory")))
    speaker.desired(None, "cluster c1 ended")
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
    assert speaker.doing == "free: cluster c1 ended"


def test_how_joining_reads() -> None:
    profile = NodeProfile(memory_bytes=4 * 10**9, gflops=38.04, up_bytes_per_s=2.5e6)
    assert joined("attic", profile) == "joined as attic: 4.0 GB, 38 GFLOP/s, 20 Mbit/s up"


def test_a_home_remembers_its_port_and_forgets_its_parts(tmp_path: Path) -> None:
    home = Home(tmp_path, "ab" * 32, "attic")
    assert home.directory.name == "abababab-attic"
    with home.held():
        assert home.port == 0
        home.port = 7711
        (home.part(3) / "stage").write_bytes(b"x")
    again = Home(tmp_path, "ab" * 32, "attic")
    assert again.port == 7711
    assert sorted(path.name for path in again.directory.iterdir()) == ["lock", "port", "worker.log"]
    with again.held():
        (again.directory / "port").write_text("nonsense")
        assert again.port == 0


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 10))
def test_an_outbox_keeps_the_newest_in_order(numbers: list[int], most: int) -> None:
    async def saying() -> list[str]:
        outbox = Outbox(most)
        for number in numbers:
            outbox.put(Beat(str(number)))
        said = []
        while len(outbox):
            first = await outbox.first()
            assert await outbox.first() is first  # until it is dropped
            outbox.drop(first)
            assert isinstance(first, Beat)
            said.append(first.doing)
        return said

    assert asyncio.run(saying()) == [str(number) for number in numbers][-most:]
