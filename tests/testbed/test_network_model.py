"""The internet on a virtual clock: rates, delays, queues and cuts to the microsecond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravnest.testbed import Home, HostSpec, Line, Topology
from ravnest.testbed.network import Network
from tests.testbed.packets import TCP, make

SIZE = 1000  # of every packet on the wire


def topology(up: float = 1e5, down: float = 2e5, delay_s: float = 0.01, queue_s: float = 10.0) -> Topology:
    """Two alike and one without limits."""
    line = Line(up_bytes_per_s=up, down_bytes_per_s=down, delay_s=delay_s, queue_s=queue_s)
    return Topology(hosts=(HostSpec(name="a", line=line), HostSpec(name="b", line=line), HostSpec(name="c")))


def packet(made: Topology, source: str, target: str, payload: int = SIZE - 40) -> bytes:
    return make(TCP, (made.address(source), 1), (made.public_address(target), 2), bytes(payload))


def arrivals(network: Network, until_s: float = 1e6) -> list[tuple[float, str]]:
    """When and where packets arrive, if somebody looks whenever something is due."""
    found = []
    while (due_s := network.due()) is not None and due_s <= until_s:
        found += [(due_s, host) for host, _ in network.arrivals(due_s)]
    return found


def test_a_packet_takes_both_delays_and_the_slower_line() -> None:
    made = topology()
    network = Network(made)
    network.send(5.0, "a", packet(made, "a", "b"))
    ((time_s, host),) = arrivals(network)
    assert host == "b"
    assert time_s == pytest.approx(5.0 + 0.01 + 0.01 + SIZE / 1e5)


def test_packets_wait_for_the_line_in_order() -> None:
    made = topology()
    network = Network(made)
    for _ in range(20):
        network.send(0.0, "a", packet(made, "a", "b"))
    times = [time for time, _ in arrivals(network)]
    assert times == pytest.approx([0.02 + (i + 1) * SIZE / 1e5 for i in range(20)])


def test_who_is_far_away_does_not_hold_up_who_is_near() -> None:
    near, far = Line(delay_s=0.001), Line(delay_s=0.5)
    made = Topology(
        hosts=(HostSpec(name="a", line=far), HostSpec(name="b", line=near),
               HostSpec(name="c", line=Line(down_bytes_per_s=1e5)))
    )  # fmt: skip
    network = Network(made)
    network.send(0.0, "a", packet(made, "a", "c"))
    network.send(0.1, "b", packet(made, "b", "c"))
    assert [time for time, _ in arrivals(network)] == pytest.approx([0.101 + SIZE / 1e5, 0.5 + SIZE / 1e5])


def test_two_slow_senders_fill_a_fast_line() -> None:
    """A line is taken only for what a packet needs of it, though the packet comes in slowly."""
    slow, fast = Line(up_bytes_per_s=1e5, queue_s=10), Line(down_bytes_per_s=2e5)
    made = Topology(hosts=(HostSpec(name="a", line=slow), HostSpec(name="b", line=slow), HostSpec(name="c", line=fast)))
    network = Network(made)
    for _ in range(100):
        network.send(0.0, "a", packet(made, "a", "c"))
        network.send(0.0, "b", packet(made, "b", "c"))
    assert arrivals(network)[-1][0] == pytest.approx(200 * SIZE / 2e5, rel=0.02)


@given(st.lists(st.tuples(st.floats(0, 0.05), st.sampled_from("abc"), st.sampled_from("abc")), max_size=60),
       st.floats(0.001, 0.1))  # fmt: skip
def test_what_is_sent_arrives_or_is_counted_as_lost(sends: list[tuple[float, str, str]], queue_s: float) -> None:
    made = topology(queue_s=queue_s)
    network = Network(made)
    now_s, found = 0.0, []
    for wait_s, source, target in sends:
        now_s += wait_s
        found += arrivals(network, now_s)
        network.send(now_s, source, packet(made, source, target))
    found += arrivals(network)
    assert [time for time, _ in found] == sorted(time for time, _ in found)
    traffic = [network.traffic(host) for host in "abc"]
    assert sum(t.sent_bytes for t in traffic) == len(sends) * SIZE
    assert sum(t.received_bytes for t in traffic) == len(found) * SIZE
    assert sum(t.lost_bytes for t in traffic) == (len(sends) - len(found)) * SIZE


def test_a_full_queue_drops() -> None:
    made = topology(queue_s=0.1)  # ten packets' worth at 1e5 bytes per second
    network = Network(made)
    for _ in range(50):
        network.send(0.0, "a", packet(made, "a", "b"))
    assert len(arrivals(network)) == 11
    assert network.traffic("a").lost_bytes == 39 * SIZE
    network.send(5.0, "a", packet(made, "a", "b"))
    assert len(arrivals(network)) == 1


def test_acknowledgements_pass_those_who_wait() -> None:
    made = topology(queue_s=0.1)
    network = Network(made)
    for _ in range(10):
        network.send(0.0, "a", packet(made, "a", "b"))
    network.send(0.0, "a", packet(made, "a", "c", payload=0))
    time_s, host = arrivals(network)[0]
    assert host == "c"
    assert time_s == pytest.approx(0.01 + 40 / 1e5)
    for _ in range(1000):  # but a flood of them is no way around the rate
        network.send(9.0, "a", packet(made, "a", "c", payload=0))
    assert len(arrivals(network)) * 40 == pytest.approx(2 * 0.1 * 1e5, rel=0.01)


def test_a_cut_loses_what_is_under_way() -> None:
    made = topology()
    network = Network(made)
    for source, target in (("a", "b"), ("c", "b")):
        network.send(0.0, source, packet(made, source, target))
    network.cut("a", "b")
    assert [host for _, host in arrivals(network)] == ["b"]
    assert network.traffic("a").lost_bytes == SIZE
    network.restore("b", "a")
    network.cut("b")
    for source, target in (("a", "b"), ("b", "c"), ("a", "c")):
        network.send(1.0, source, packet(made, source, target))
    assert [host for _, host in arrivals(network)] == ["c"]
    network.restore("b")
    network.send(2.0, "a", packet(made, "a", "b"))
    assert [host for _, host in arrivals(network)] == ["b"]


def test_a_home_shares_its_line_but_not_its_local_network() -> None:
    made = Topology(
        homes=(Home(name="anna", line=Line(up_bytes_per_s=1e5, delay_s=0.02)),),
        hosts=(HostSpec(name="a", home="anna"), HostSpec(name="b", home="anna"), HostSpec(name="c")),
    )
    network = Network(made)
    for source in ("a", "b"):
        network.send(0.0, source, packet(made, source, "c"))
    assert [time for time, _ in arrivals(network)] == pytest.approx([0.02 + SIZE / 1e5, 0.02 + 2 * SIZE / 1e5])
    network.send(3.0, "a", make(TCP, (made.address("a"), 1), (made.address("b"), 2)))
    assert arrivals(network) == [(3.0, "b")]


@given(st.binary(max_size=80))
def test_garbage_is_lost(data: bytes) -> None:
    network = Network(topology())
    network.send(0.0, "a", bytes(10) + data)
    assert not arrivals(network)
    assert network.traffic("a").lost_bytes == len(data)
