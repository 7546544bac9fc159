"""The network model on a virtual clock: exact rates, delays, queues and cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import Home, HostSpec, Line, Topology
from testbed.network import Network
from tests.integration.testbed.packets import TCP, make

SIZE = 1000  # of every packet on the wire


def topology(up: float = 1e5, down: float = 2e5, delay_s: float = 0.01, queue_s: float = 10.0) -> Topology:
    """Two hosts with the same line and one without limits."""
    line = Line(up_bytes_per_s=up, down_bytes_per_s=down, delay_s=delay_s, queue_s=queue_s)
    return Topology(hosts=(HostSpec(name="a", line=line), HostSpec(name="b", line=line), HostSpec(name="c")))


def packet(layout: Topology, source: str, destination: str, payload: int = SIZE - 40) -> bytes:
    return make(TCP, (layout.address(source), 1), (layout.public_address(destination), 2), bytes(payload))


def arrivals(network: Network, until_s: float = 1e6) -> list[tuple[float, str]]:
    """The times and hosts at which packets arrive, polled whenever one is due."""
    arrived = []
    while (due_s := network.due()) is not None and due_s <= until_s:
        arrived += [(due_s, host) for host, _ in network.arrivals(due_s)]
    return arrived


def test_a_packet_takes_both_delays_and_the_slower_line() -> None:
    layout = topology()
    network = Network(layout)
    network.send(5.0, "a", packet(layout, "a", "b"))
    ((time_s, host),) = arrivals(network)
    assert host == "b"
    assert time_s == pytest.approx(5.0 + 0.01 + 0.01 + SIZE / 1e5)


def test_packets_wait_for_the_line_in_order() -> None:
    layout = topology()
    network = Network(layout)
    for _ in range(20):
        network.send(0.0, "a", packet(layout, "a", "b"))
    times = [time for time, _ in arrivals(network)]
    assert times == pytest.approx([0.02 + (i + 1) * SIZE / 1e5 for i in range(20)])


def test_a_distant_sender_does_not_delay_a_near_one() -> None:
    near, far = Line(delay_s=0.001), Line(delay_s=0.5)
    layout = Topology(
        hosts=(HostSpec(name="a", line=far), HostSpec(name="b", line=near),
               HostSpec(name="c", line=Line(down_bytes_per_s=1e5)))
    )  # fmt: skip
    network = Network(layout)
    network.send(0.0, "a", packet(layout, "a", "c"))
    network.send(0.1, "b", packet(layout, "b", "c"))
    assert [time for time, _ in arrivals(network)] == pytest.approx([0.101 + SIZE / 1e5, 0.5 + SIZE / 1e5])


def test_two_slow_senders_fill_a_fast_line() -> None:
    """A packet that arrives slowly occupies a line only for its own transmission time."""
    slow, fast = Line(up_bytes_per_s=1e5, queue_s=10), Line(down_bytes_per_s=2e5)
    layout = Topology(
        hosts=(HostSpec(name="a", line=slow), HostSpec(name="b", line=slow), HostSpec(name="c", line=fast))
    )
    network = Network(layout)
    for _ in range(100):
        network.send(0.0, "a", packet(layout, "a", "c"))
        network.send(0.0, "b", packet(layout, "b", "c"))
    assert arrivals(network)[-1][0] == pytest.approx(200 * SIZE / 2e5, rel=0.02)


@given(st.lists(st.tuples(st.floats(0, 0.05), st.sampled_from("abc"), st.sampled_from("abc")), max_size=60),
       st.floats(0.001, 0.1))  # fmt: skip
def test_every_packet_arrives_or_is_counted_as_lost(sends: list[tuple[float, str, str]], queue_s: float) -> None:
    layout = topology(queue_s=queue_s)
    network = Network(layout)
    now_s, arrived = 0.0, []
    for wait_s, source, destination in sends:
        now_s += wait_s
        arrived += arrivals(network, now_s)
        network.send(now_s, source, packet(layout, source, destination))
    arrived += arrivals(network)
    assert [time for time, _ in arrived] == sorted(time for time, _ in arrived)
    traffic = [network.traffic(host) for host in "abc"]
    assert sum(t.sent_bytes for t in traffic) == len(sends) * SIZE
    assert sum(t.received_bytes for t in traffic) == len(arrived) * SIZE
    assert sum(t.lost_bytes for t in traffic) == (len(sends) - len(arrived)) * SIZE


def test_a_full_queue_drops() -> None:
    layout = topology(queue_s=0.1)  # ten packets' worth at 1e5 bytes per second
    network = Network(layout)
    for _ in range(50):
        network.send(0.0, "a", packet(layout, "a", "b"))
    assert len(arrivals(network)) == 11
    assert network.traffic("a").lost_bytes == 39 * SIZE
    network.send(5.0, "a", packet(layout, "a", "b"))
    assert len(arrivals(network)) == 1


def test_acknowledgements_overtake_waiting_packets() -> None:
    layout = topology(queue_s=0.1)
    network = Network(layout)
    for _ in range(10):
        network.send(0.0, "a", packet(layout, "a", "b"))
    network.send(0.0, "a", packet(layout, "a", "c", payload=0))
    time_s, host = arrivals(network)[0]
    assert host == "c"
    assert time_s == pytest.approx(0.01 + 40 / 1e5)
    for _ in range(1000):  # but a flood of them is limited by the rate
        network.send(9.0, "a", packet(layout, "a", "c", payload=0))
    assert len(arrivals(network)) * 40 == pytest.approx(2 * 0.1 * 1e5, rel=0.01)


def test_a_cut_drops_packets_in_flight() -> None:
    layout = topology()
    network = Network(layout)
    for source, destination in (("a", "b"), ("c", "b")):
        network.send(0.0, source, packet(layout, source, destination))
    network.cut("a", "b")
    assert [host for _, host in arrivals(network)] == ["b"]
    assert network.traffic("a").lost_bytes == SIZE
    network.restore("b", "a")
    network.cut("b")
    for source, destination in (("a", "b"), ("b", "c"), ("a", "c")):
        network.send(1.0, source, packet(layout, source, destination))
    assert [host for _, host in arrivals(network)] == ["c"]
    network.restore("b")
    network.send(2.0, "a", packet(layout, "a", "b"))
    assert [host for _, host in arrivals(network)] == ["b"]


def test_a_home_shares_its_line_but_not_its_local_network() -> None:
    layout = Topology(
        homes=(Home(name="anna", line=Line(up_bytes_per_s=1e5, delay_s=0.02)),),
        hosts=(HostSpec(name="a", home="anna"), HostSpec(name="b", home="anna"), HostSpec(name="c")),
    )
    network = Network(layout)
    for source in ("a", "b"):
        network.send(0.0, source, packet(layout, source, "c"))
    assert [time for time, _ in arrivals(network)] == pytest.approx([0.02 + SIZE / 1e5, 0.02 + 2 * SIZE / 1e5])
    network.send(3.0, "a", make(TCP, (layout.address("a"), 1), (layout.address("b"), 2)))
    assert arrivals(network) == [(3.0, "b")]


@given(st.binary(max_size=80))
def test_malformed_packets_are_dropped(data: bytes) -> None:
    network = Network(topology())
    network.send(0.0, "a", bytes(10) + data)
    assert not arrivals(network)
    assert network.traffic("a").lost_bytes == len(data)
