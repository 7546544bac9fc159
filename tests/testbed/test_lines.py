"""Lines hold what they promise: rates, delays, and nothing at all while they are cut."""

from __future__ import annotations

from statistics import median

import pytest

from ravnest.testbed import Home, HostSpec, Line, Testbed, Topology
from tests.testbed.running import asked, heard, server, start

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


def rate(bed: Testbed, source: str, target: str, num_bytes: int, warm_up_bytes: int = 200_000) -> float:
    receiver = server(bed, target, "receive", warm_up_bytes)
    start(bed, source, "send", target, num_bytes)
    return float(heard(receiver))


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
    bed: Testbed, source: str, target: str, num_bytes: int, warm_up_bytes: int, expected: float
) -> None:
    assert rate(bed, source, target, num_bytes, warm_up_bytes) == pytest.approx(expected, rel=0.15)


def test_both_directions_at_once(bed: Testbed) -> None:
    """Acknowledgements do not wait behind the data of the other direction."""
    receivers = [server(bed, host, "receive", 500_000) for host in ("even-1", "even-2")]
    start(bed, "even-1", "send", "even-2", 6_000_000)
    start(bed, "even-2", "send", "even-1", 6_000_000)
    assert [heard(receiver) for receiver in receivers] == pytest.approx([40 * MBIT] * 2, rel=0.15)


def test_a_local_network_has_no_limit(bed: Testbed) -> None:
    assert rate(bed, "anna-1", "anna-2", 50_000_000) > 400 * MBIT


def test_hosts_of_a_home_share_its_line(bed: Testbed) -> None:
    receivers = [server(bed, target, "receive", 200_000) for target in ("hub", "fast")]
    for source, target in (("shared-1", "hub"), ("shared-2", "fast")):
        start(bed, source, "send", target, 1_500_000)
    rates = [float(heard(receiver)) for receiver in receivers]
    assert 13 * MBIT < sum(rates) < 24 * MBIT  # 16 while both send, and the last one has a while of all


@pytest.mark.parametrize(
    ("source", "target", "round_trip_s"),
    [("anna-1", "hub", 0.0), ("anna-2", "hub", 0.04), ("anna-2", "fast", 0.09), ("anna-2", "anna-1", 0.0)],
)
def test_a_packet_takes_the_delays_of_both_ends(bed: Testbed, source: str, target: str, round_trip_s: float) -> None:
    server(bed, target)
    asking = server(bed, source, "ask", target)
    times = [asked(asking, 5) for _ in range(15)]
    assert round_trip_s <= median(time or 5.0 for time in times) <= round_trip_s * 1.2 + 0.004


def test_bytes_on_the_wire_are_counted(bed: Testbed) -> None:
    before = bed.usage("anna-1").sent_bytes, bed.usage("hub").received_bytes
    rate(bed, "anna-1", "hub", 1_000_000)
    sent, received = bed.usage("anna-1").sent_bytes - before[0], bed.usage("hub").received_bytes - before[1]
    assert 1_000_000 * 1.03 < received <= sent < 1_000_000 * 1.6  # what the queue drops at first is sent again


def test_a_cut_is_silent_and_can_be_restored(bed: Testbed) -> None:
    server(bed, "hub")
    asking = server(bed, "anna-1", "ask", "hub")
    assert asked(asking, 5) is not None
    bed.cut("anna-1")
    assert asked(asking, 0.3) is None
    bed.restore("anna-1")
    assert asked(asking, 10) is not None  # the same connection goes on


def test_a_cut_between_two_leaves_their_other_links(bed: Testbed) -> None:
    """Also where one of them shares its public address with a third."""
    for host in ("hub", "anna-1"):
        server(bed, host)
    asking = [server(bed, *link) for link in (("anna-2", "ask", "hub"), ("anna-1", "ask", "hub"))]
    local = server(bed, "anna-2", "ask", "anna-1")
    bed.cut("anna-1", "hub")
    assert asked(asking[1], 0.3) is None
    assert asked(asking[0], 5) is not None
    assert asked(local, 5) is not None
    bed.cut("anna-1", "anna-2")
    assert asked(local, 0.3) is None
    for pair in (("anna-1", "hub"), ("anna-2", "anna-1")):
        bed.restore(*pair)
    assert asked(asking[1], 10) is not None
    assert asked(local, 10) is not None


def test_no_such_host(bed: Testbed) -> None:
    with pytest.raises(ValueError, match=r"no host 'anna-9'; there are hub, fast"):
        bed.cut("hub", "anna-9")
