"""Lines have the configured rates and delays, and drop everything while they are cut."""

from __future__ import annotations

from statistics import median

import pytest

from testbed import Home, HostSpec, Line, Testbed, Topology
from tests.integration.testbed.running import ask, receive, server, start

MBIT = 125_000.0
EVEN = Line(up_bytes_per_s=40 * MBIT, down_bytes_per_s=40 * MBIT, delay_s=0.01)
TOPOLOGY = Topology(
    homes=(Home(name="anna"), Home(name="shared", nat="none", line=Line(up_bytes_per_s=16 * MBIT))),
    hosts=(
        HostSpec(name="hub"),
        HostSpec(name="fast", line=Line(up_bytes_per_s=100 * MBIT, down_bytes_per_s=100 * MBIT, delay_s=0.025)),
        HostSpec(name="anna-1", home="anna", line=Line(up_bytes_per_s=20 * MBIT, down_bytes_per_s=40 * MBIT)),
        HostSpec(name="anna-2", home="anna", line=Line(delay_s=0.02)),
        HostSpec(name="even-1", line=EVEN),
        HostSpec(name="even-2", line=EVEN),
        HostSpec(name="shared-1", home="shared"),
        HostSpec(name="shared-2", home="shared"),
    ),
)


def rate(testbed: Testbed, source: str, target: str, num_bytes: int, warm_up_bytes: int = 200_000) -> float:
    receiver = server(testbed, target, "receive", warm_up_bytes)
    start(testbed, source, "send", target, num_bytes)
    return float(receive(receiver))


@pytest.mark.parametrize(
    ("source", "target", "num_bytes", "warm_up_bytes", "expected"),
    [
        ("anna-1", "hub", 3_000_000, 200_000, 20 * MBIT),
        ("fast", "hub", 16_000_000, 3_000_000, 100 * MBIT),
        ("hub", "fast", 16_000_000, 3_000_000, 100 * MBIT),
    ],
    ids=["up", "up with delay", "down with delay"],
)
def test_a_line_has_its_rate(
    testbed: Testbed, source: str, target: str, num_bytes: int, warm_up_bytes: int, expected: float
) -> None:
    assert rate(testbed, source, target, num_bytes, warm_up_bytes) == pytest.approx(expected, rel=0.15)


def test_both_directions_at_once(testbed: Testbed) -> None:
    """Acknowledgements do not wait behind the data of the other direction."""
    receivers = [server(testbed, host, "receive", 500_000) for host in ("even-1", "even-2")]
    start(testbed, "even-1", "send", "even-2", 6_000_000)
    start(testbed, "even-2", "send", "even-1", 6_000_000)
    assert [receive(receiver) for receiver in receivers] == pytest.approx([40 * MBIT] * 2, rel=0.15)


def test_a_local_network_has_no_limit(testbed: Testbed) -> None:
    assert rate(testbed, "anna-1", "anna-2", 50_000_000) > 400 * MBIT


def test_hosts_of_a_home_share_its_line(testbed: Testbed) -> None:
    receivers = [server(testbed, target, "receive", 200_000) for target in ("hub", "fast")]
    for source, target in (("shared-1", "hub"), ("shared-2", "fast")):
        start(testbed, source, "send", target, 4_000_000)
    rates = [float(receive(receiver)) for receiver in receivers]
    assert 13 * MBIT < sum(rates) < 24 * MBIT  # 16 while both send; then one has the whole line


@pytest.mark.parametrize(
    ("source", "target", "round_trip_s"),
    [("anna-1", "hub", 0.0), ("anna-2", "hub", 0.04), ("anna-2", "fast", 0.09), ("anna-2", "anna-1", 0.0)],
)
def test_a_packet_has_the_delays_of_both_ends(testbed: Testbed, source: str, target: str, round_trip_s: float) -> None:
    server(testbed, target)
    client = server(testbed, source, "ask", target)
    times = [ask(client, 5) for _ in range(15)]
    assert round_trip_s <= median(time or 5.0 for time in times) <= round_trip_s * 1.2 + 0.004


def test_bytes_on_the_wire_are_counted(testbed: Testbed) -> None:
    before = testbed.usage("anna-1").sent_bytes, testbed.usage("hub").received_bytes
    rate(testbed, "anna-1", "hub", 1_000_000)
    sent, received = testbed.usage("anna-1").sent_bytes - before[0], testbed.usage("hub").received_bytes - before[1]
    assert 1_000_000 * 1.03 < received <= sent < 1_000_000 * 1.6  # packets that the queue drops at first are sent again


def test_a_cut_drops_packets_until_it_is_restored(testbed: Testbed) -> None:
    server(testbed, "hub")
    client = server(testbed, "anna-1", "ask", "hub")
    assert ask(client, 5) is not None
    testbed.cut("anna-1")
    assert ask(client, 0.3) is None
    testbed.restore("anna-1")
    assert ask(client, 10) is not None  # on the same connection


def test_a_cut_between_two_leaves_their_other_links(testbed: Testbed) -> None:
    """Also if one of them shares its public address with a third host."""
    for host in ("hub", "anna-1"):
        server(testbed, host)
    client = [server(testbed, *link) for link in (("anna-2", "ask", "hub"), ("anna-1", "ask", "hub"))]
    local = server(testbed, "anna-2", "ask", "anna-1")
    testbed.cut("anna-1", "hub")
    assert ask(client[1], 0.3) is None
    assert ask(client[0], 5) is not None
    assert ask(local, 5) is not None
    testbed.cut("anna-1", "anna-2")
    assert ask(local, 0.3) is None
    for pair in (("anna-1", "hub"), ("anna-2", "anna-1")):
        testbed.restore(*pair)
    assert ask(client[1], 10) is not None
    assert ask(local, 10) is not None


def test_an_unknown_host_is_rejected(testbed: Testbed) -> None:
    with pytest.raises(ValueError, match=r"no host 'anna-9'; there are hub, fast"):
        testbed.cut("hub", "anna-9")
