"""NATs hide their hosts, admit answers, and do or do not allow hole punching."""

from __future__ import annotations

import pytest

from testbed import Home, HostSpec, Line, Testbed, Topology
from tests.integration.testbed.running import receive, server, start

FAR = Line(delay_s=0.01)
TOPOLOGY = Topology(
    homes=(Home(name="anna"), Home(name="bela"), Home(name="carl", nat="symmetric"), Home(name="open", nat="none")),
    hosts=(
        HostSpec(name="hub"),
        *(
            HostSpec(name=f"{home}-{i}", home=home, line=FAR)
            for home in ("anna", "bela", "carl", "open")
            for i in (1, 2)
        ),
    ),
)


def test_outside_a_host_has_the_address_of_its_router(testbed: Testbed) -> None:
    echo_server = server(testbed, "hub")
    for host in ("anna-1", "anna-2", "bela-1", "open-1"):
        assert receive(start(testbed, host, "dial", "hub", 5)) == "connected"
        assert receive(echo_server) == testbed.hosts[host].public_address
    public = [testbed.hosts[host].public_address for host in ("anna-1", "anna-2", "bela-1", "open-1", "open-2")]
    assert public[0] == public[1]
    assert len(set(public)) == 4


def test_unsolicited_connections_are_dropped(testbed: Testbed) -> None:
    server(testbed, "anna-1")
    for address in (testbed.hosts["anna-1"].public_address, testbed.address("anna-1")):
        assert receive(start(testbed, "hub", "dial", address, 0.2)) == "TimeoutError"  # dropped, not rejected
        assert receive(start(testbed, "bela-1", "dial", address, 0.2)) == "TimeoutError"


def test_without_a_nat_all_connections_are_accepted(testbed: Testbed) -> None:
    echo_server = server(testbed, "open-1")
    for host in ("hub", "anna-1", "open-2"):
        assert receive(start(testbed, host, "dial", "open-1", 5)) == "connected"
        assert receive(echo_server) == testbed.hosts[host].public_address


def test_a_home_is_a_local_network(testbed: Testbed) -> None:
    echo_server = server(testbed, "anna-1")
    assert receive(start(testbed, "anna-2", "dial", "anna-1", 5)) == "connected"
    assert receive(echo_server) == testbed.address("anna-2")


def test_hosts_resolve_names_of_their_home_and_of_public_hosts(testbed: Testbed) -> None:
    assert receive(start(testbed, "anna-1", "dial", "bela-1", 5)) == "gaierror"
    assert receive(start(testbed, "anna-1", "dial", "anna-2", 5)) == "ConnectionRefusedError"


@pytest.mark.parametrize(
    ("a", "b", "punched"),
    [("anna-1", "bela-1", True), ("anna-2", "carl-1", False), ("open-1", "carl-2", False)],
    ids=["plain to plain", "plain to symmetric", "none to symmetric"],
)
def test_hole_punching(testbed: Testbed, a: str, b: str, punched: bool) -> None:
    """Simultaneous open to observed addresses; a symmetric NAT has another port for every peer."""
    server(testbed, "hub", "introduce")
    ends = [start(testbed, host, "punch", "hub", 20 if punched else 3) for host in (a, b)]
    assert [receive(end) for end in ends] == ([b, a] if punched else [None, None])
