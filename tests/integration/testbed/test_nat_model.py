"""Address translation of packets: a translated packet equals one sent from the new address."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.nat import Nat
from testbed.packet import flow_of, rewrite_destination, rewrite_source, wire_bytes
from tests.integration.testbed.packets import ICMP, TCP, UDP, make

HOME = "198.18.0.1"
PEER = ("198.18.0.9", 7000)

addresses = st.integers(1, 2**32 - 2).map(lambda number: str(IPv4Address(number)))
places = st.tuples(addresses, st.integers(1, 65_535))


def home(*, symmetric: bool = False) -> Nat:
    return Nat(IPv4Address(HOME).packed, symmetric=symmetric)


def sent(nat: Nat, source: tuple[str, int], destination: tuple[str, int] = PEER, protocol: int = TCP) -> int:
    """The source port with which a packet leaves the home."""
    packet = bytearray(make(protocol, source, destination))
    assert nat.translate_outbound(packet)
    flow = flow_of(packet)
    assert flow is not None
    assert flow.source == nat.address
    return flow.source_port


def received(nat: Nat, source: tuple[str, int], port: int, protocol: int = TCP) -> tuple[str, int] | None:
    """The inner address and port that a packet to a port of the router arrives at."""
    packet = bytearray(make(protocol, source, (HOME, port)))
    inner = nat.translate_inbound(packet)
    flow = flow_of(packet)
    assert flow is not None
    return None if inner is None else (str(IPv4Address(inner)), flow.destination_port)


@given(
    st.sampled_from([TCP, UDP, ICMP]), places, places, places, st.booleans(), st.binary(max_size=40)
)  # the two zeros of ones' complement may differ
def test_rewriting_equals_sending_from_there(
    protocol: int, a: tuple[str, int], b: tuple[str, int], new: tuple[str, int], partial: bool, payload: bytes
) -> None:
    partial = partial and protocol != ICMP
    packet = bytearray(make(protocol, a, b, payload, partial=partial))
    rewrite_source(packet, IPv4Address(new[0]).packed, new[1])
    assert same(packet, make(protocol, new, b, payload, partial=partial))
    if protocol != ICMP:
        packet = bytearray(make(protocol, a, b, payload, partial=partial))
        rewrite_destination(packet, IPv4Address(new[0]).packed, new[1])
        assert same(packet, make(protocol, a, new, payload, partial=partial))


def same(packet: bytearray, expected: bytes) -> bool:
    """Whether packets are equal, where a checksum may be either of the two zeros."""
    if len(packet) != len(expected):
        return False
    words = zip(_words(packet), _words(expected), strict=True)
    return all(a == b or {a, b} == {b"\0\0", b"\xff\xff"} for a, b in words)


def _words(data: bytes | bytearray) -> list[bytes]:
    return [bytes(data[i : i + 2]) for i in range(0, len(data), 2)]


def test_a_plain_nat_keeps_ports_where_it_can() -> None:
    nat = home()
    assert sent(nat, ("192.168.1.10", 5000)) == 5000
    assert sent(nat, ("192.168.1.10", 5000), ("198.18.0.8", 80)) == 5000  # a third party observes the port to dial
    other = sent(nat, ("192.168.1.11", 5000))
    assert other != 5000
    assert sent(nat, ("192.168.1.11", 5000)) == other
    assert received(nat, PEER, 5000) == ("192.168.1.10", 5000)
    assert received(nat, PEER, other) == ("192.168.1.11", 5000)


def test_a_symmetric_nat_has_a_port_for_every_mapping() -> None:
    nat = home(symmetric=True)
    ports = [sent(nat, ("192.168.1.10", 5000), (PEER[0], port)) for port in range(1, 50)]
    assert len(set(ports)) == 49
    assert received(nat, (PEER[0], 7), ports[6]) == ("192.168.1.10", 5000)
    assert received(nat, (PEER[0], 8), ports[6]) is None


@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_only_answers_are_admitted(protocol: int) -> None:
    nat = home()
    sent(nat, ("192.168.1.10", 5000), protocol=protocol)
    assert received(nat, (PEER[0], 7001), 5000, protocol) is None
    assert received(nat, ("198.18.0.8", PEER[1]), 5000, protocol) is None
    assert received(nat, PEER, 5001, protocol) is None
    assert received(nat, PEER, 5000, TCP + UDP - protocol) is None
    assert received(nat, PEER, 5000, protocol) == ("192.168.1.10", 5000)


def test_the_oldest_mapping_is_removed_when_there_are_too_many() -> None:
    nat = Nat(IPv4Address(HOME).packed, max_mappings=10)
    peers = [(f"198.18.1.{i}", 80) for i in range(12)]
    for peer in peers:
        sent(nat, ("192.168.1.10", 5000), peer)
    assert [received(nat, peer, 5000) is not None for peer in peers] == [False] * 2 + [True] * 10


@given(st.binary(min_size=19, max_size=100), st.sampled_from([ICMP, TCP, UDP, 0x99]))
def test_malformed_packets_are_dropped(data: bytes, protocol: int) -> None:
    packet = bytearray(bytes(10) + b"\x45" + data)
    packet[19] = protocol
    size = len(packet)
    assert home().translate_inbound(packet) is None
    assert home().translate_outbound(packet) in (False, protocol != 0x99)
    assert len(packet) == size


def test_fragments_are_not_translated() -> None:
    packet = bytearray(make(UDP, ("192.168.1.10", 1), PEER))
    packet[16:18] = b"\x20\x00"  # more fragments follow
    assert not home().translate_outbound(packet)


def test_a_large_segment_counts_as_the_packets_it_is_split_into() -> None:
    packet = bytearray(make(TCP, ("10.0.0.1", 1), PEER, bytes(14_600)))
    assert wire_bytes(packet) == 14_640
    packet[1:10] = bytes([1, 40, 0, 1460 & 255, 1460 >> 8, 20, 0, 16, 0])  # to be split into segments of 1460
    assert wire_bytes(packet) == 10 * 1500
