"""NATs hide, let answers in, and can be punched or not."""

from __future__ import annotations

import pytest

from ravnest.testbed import Home, HostSpec, Line, Testbed, Topology
from tests.testbed.running import heard, server, start

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


def test_outside_a_host_has_the_address_of_its_home(bed: Testbed) -> None:
    answering = server(bed, "hub")
    for host in ("anna-1", "anna-2", "bela-1", "open-1"):
        assert heard(start(bed, host, "dial", "hub", 5)) == "connected"
        assert heard(answering) == bed.hosts[host].public_address
    public = [bed.hosts[host].public_address for host in ("anna-1", "anna-2", "bela-1", "open-1", "open-2")]
    assert public[0] == public[1]
    assert len(set(public)) == 4


def test_nobody_gets_in_uninvited(bed: Testbed) -> None:
    server(bed, "anna-1")
    for address in (bed.hosts["anna-1"].public_address, bed.address("anna-1")):
        assert heard(start(bed, "hub", "dial", address, 0.2)) == "TimeoutError"  # silence, not a refusal
        assert heard(start(bed, "bela-1", "dial", address, 0.2)) == "TimeoutError"


def test_without_a_nat_everybody_gets_in(bed: Testbed) -> None:
    answering = server(bed, "open-1")
    for host in ("hub", "anna-1", "open-2"):
        assert heard(start(bed, host, "dial", "open-1", 5)) == "connected"
        assert heard(answering) == bed.hosts[host].public_address


def test_a_home_is_a_local_network(bed: Testbed) -> None:
    answering = server(bed, "anna-1")
    assert heard(start(bed, "anna-2", "dial", "anna-1", 5)) == "connected"
    assert heard(answering) == bed.address("anna-2")


def test_names_are_of_home_and_of_public_hosts(bed: Testbed) -> None:
    assert heard(start(bed, "anna-1", "dial", "bela-1", 5)) == "gaierror"
    assert heard(start(bed, "anna-1", "dial", "anna-2", 5)) == "ConnectionRefusedError"


@pytest.mark.parametrize(
    ("a", "b", "punched"),
    [("anna-1", "bela-1", True), ("anna-2", "carl-1", False), ("open-1", "carl-2", False)],
    ids=["plain to plain", "plain to symmetric", "none to symmetric"],
)
def test_both_dial_at_once(bed: Testbed, a: str, b: str, punched: bool) -> None:
    """Simultaneous open through observed addresses; a symmetric NAT has another port for every peer."""
    server(bed, "hub", "introduce")
    ends = [start(bed, host, "punch", "hub", 20 if punched else 3) for host in (a, b)]
    assert [heard(end) for end in ends] == ([b, a] if punched else [None, None])
