"""Endpoints behind real NATs: two processes connect as directly as their NATs allow.

The testbed has no IPv6; `tests/unit/transport/test_connector.py` tests it on the loopback address.
"""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from ravnest.protocol.peer import PeerAddresses
from ravnest.protocol.relay import RELAY_PROTOCOL
from ravnest.transport.address import show
from testbed import Home, HostSpec, Line, Process, Testbed, Topology
from tests.integration.testbed.endpoints import PAYLOAD_BYTES, ConnectReport, ConnectRequest, marker, token_of
from tests.unit.transport.kinds import Members

T = TypeVar("T")

ROOT = Path(__file__).parents[3]
FAR = Line(delay_s=0.01)
HOMES = {"anna": "plain", "bela": "plain", "carl": "symmetric", "dora": "symmetric", "open": "none"}
NODES = ("anna-1", "anna-2", "bela-1", "carl-1", "dora-1", "open-1")
TOPOLOGY = Topology(
    homes=tuple(Home(name=name, nat=nat) for name, nat in HOMES.items()),  # type: ignore[arg-type]
    hosts=(HostSpec(name="hub"), *(HostSpec(name=node, home=node.split("-")[0], line=FAR) for node in NODES)),
)
TIMEOUT_S = 60.0  # for operations that take a second or two


class Nodes:
    """A hub, and on every other host a node: a process with an endpoint."""

    def __init__(self, bed: Testbed, members: Members) -> None:
        self.bed, self._members = bed, members
        self._read(self._start("hub", "coordinator", "hub", *NODES), str)
        self._nodes = {name: self._start(name, name, "node", bed.address("hub")) for name in NODES}
        self.addresses = {name: self._read(node, PeerAddresses) for name, node in self._nodes.items()}

    def connect(self, one: str, other: str) -> tuple[ConnectReport, ConnectReport]:
        """Connect two nodes; returns the report of each."""
        for name, peer in ((one, other), (other, one)):
            stdin = self._nodes[name].stdin
            assert stdin is not None
            request = ConnectRequest(peer, self.addresses[peer], token_of(one, other))
            stdin.write(msgspec.json.encode(request).decode() + "\n")
            stdin.flush()
        return self._read(self._nodes[one], ConnectReport), self._read(self._nodes[other], ConnectReport)

    def _start(self, host: str, member: str, role: str, *args: str) -> Process:
        assert self._members[member].name == member  # created on first use
        command = [
            sys.executable,
            "-m",
            "tests.integration.testbed.endpoints",
            role,
            str(self._members.directory / member),
            *args,
        ]
        return self.bed.hosts[host].run(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @staticmethod
    def _read(process: Process, kind: type[T]) -> T:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        assert ready, f"no output from {process.host}"
        line = process.stdout.readline()
        assert line, f"{process.host} ended with code {process.wait()}"
        return msgspec.json.decode(line, type=kind)


@pytest.fixture(scope="module")
def nodes(module_testbed: Callable[[Topology], Testbed], tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    return Nodes(module_testbed(TOPOLOGY), Members(tmp_path_factory.mktemp("members")))


def carried_bytes(nodes: Nodes) -> int:
    """Bytes received by the hub."""
    return nodes.bed.usage("hub").received_bytes


@pytest.mark.parametrize("node", NODES)
def test_a_node_gets_its_public_address_from_the_relay(nodes: Nodes, node: str) -> None:
    known, host = nodes.addresses[node], nodes.bed.hosts[node]
    ((address, port),) = known.addresses
    assert address == host.address
    assert known.observed is not None
    assert known.observed[0] == host.public_address
    keeps_ports = HOMES[node.split("-")[0]] != "symmetric"
    assert (known.observed[1] == port) == keeps_ports


@pytest.mark.parametrize(
    ("one", "other", "how"),
    [
        ("anna-1", "anna-2", "direct"),
        ("anna-1", "open-1", "direct"),
        ("open-1", "carl-1", "direct"),
        ("bela-1", "anna-2", "punched"),
        ("anna-1", "bela-1", "punched"),
        ("anna-1", "carl-1", "relayed"),
        ("dora-1", "carl-1", "relayed"),
    ],
    ids=[
        "one home", "plain to none", "none to symmetric", "plain to plain", "plain to plain again",
        "plain to symmetric", "symmetric to symmetric",
    ],
)  # fmt: skip
def test_two_nodes_connect_as_their_nats_allow(nodes: Nodes, one: str, other: str, how: str) -> None:
    before_bytes = carried_bytes(nodes)
    reports = nodes.connect(one, other)
    through_hub_bytes = carried_bytes(nodes) - before_bytes
    assert [report.kind for report in reports] == [how, how], reports
    assert all(report.is_complete for report in reports)
    if how == "relayed":
        assert through_hub_bytes > 2 * PAYLOAD_BYTES
    else:
        assert through_hub_bytes < PAYLOAD_BYTES / 4
    for name, report in zip((one, other), reports, strict=True):
        check_hint(report, show(nodes.addresses[name].addresses[0]))


def check_hint(report: ConnectReport, address: str) -> None:
    """Empty for a direct link; otherwise the port to forward, and the target."""
    if report.kind == "direct":
        assert report.hint == ""
        return
    port = address.rpartition(":")[2]
    assert f"forward TCP port {port} of your router to {address}" in report.hint
    expected = "may fail after a router restarts" if report.kind == "punched" else "through the coordinator"
    assert expected in report.hint


def test_relayed_payloads_are_encrypted_at_the_hub(nodes: Nodes) -> None:
    with nodes.bed.capture("hub") as wire:
        reports = nodes.connect("carl-1", "bela-1")
    assert [report.kind for report in reports] == ["relayed", "relayed"]
    assert wire.num_missed == 0
    seen = wire.bytes()
    assert len(seen) > 4 * PAYLOAD_BYTES  # two payloads, each in and out again
    assert RELAY_PROTOCOL.encode() in seen  # ALPN is not encrypted: the capture works
    for name in ("carl-1", "bela-1"):
        assert marker(name) not in seen
