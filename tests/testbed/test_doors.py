"""Doors behind real NATs: two processes reach each other as directly as their homes allow, and no worse.

The testbed has no IPv6; `tests/net/test_reach.py` has it on this machine's own address.
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

from ravnest.core.control import Whereabouts
from ravnest.net.addresses import show
from ravnest.net.hello import RELAY_PROTOCOL
from ravnest.testbed import Home, HostSpec, Line, Process, Testbed, Topology
from tests.net.kinds import Members
from tests.testbed.doors import LETTER_BYTES, Account, Invitation, marked, token_of

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
FAR = Line(delay_s=0.01)
HOMES = {"anna": "plain", "bela": "plain", "carl": "symmetric", "dora": "symmetric", "open": "none"}
NODES = ("anna-1", "anna-2", "bela-1", "carl-1", "dora-1", "open-1")
TOPOLOGY = Topology(
    homes=tuple(Home(name=name, nat=nat) for name, nat in HOMES.items()),  # type: ignore[arg-type]
    hosts=(HostSpec(name="hub"), *(HostSpec(name=node, home=node.split("-")[0], line=FAR) for node in NODES)),
)
PATIENCE_S = 60.0  # of the tests, for what takes a second or two


class Street:
    """A hub and a node on every other host, each a process with a door."""

    def __init__(self, bed: Testbed, members: Members) -> None:
        self.bed, self._members = bed, members
        self._hear(self._start("hub", "coordinator", "hub", *NODES), str)
        self._nodes = {name: self._start(name, name, "node", bed.address("hub")) for name in NODES}
        self.where = {name: self._hear(node, Whereabouts) for name, node in self._nodes.items()}

    def introduce(self, one: str, other: str) -> tuple[Account, Account]:
        """Tell each where the other is; what each says of how they met."""
        for here, there in ((one, other), (other, one)):
            stdin = self._nodes[here].stdin
            assert stdin is not None
            invitation = Invitation(there, self.where[there], token_of(one, other))
            stdin.write(msgspec.json.encode(invitation).decode() + "\n")
            stdin.flush()
        return self._hear(self._nodes[one], Account), self._hear(self._nodes[other], Account)

    def _start(self, host: str, member: str, role: str, *args: str) -> Process:
        assert self._members[member].name == member  # made, if need be
        command = [sys.executable, "-m", "tests.testbed.doors", role, str(self._members.directory / member), *args]
        return self.bed.hosts[host].run(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @staticmethod
    def _hear(process: Process, kind: type[T]) -> T:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        assert ready, f"{process.host} says nothing"
        line = process.stdout.readline()
        assert line, f"{process.host} ended with code {process.wait()}"
        return msgspec.json.decode(line, type=kind)


@pytest.fixture(scope="module")
def street(module_testbed: Callable[[Topology], Testbed], tmp_path_factory: pytest.TempPathFactory) -> Street:
    return Street(module_testbed(TOPOLOGY), Members(tmp_path_factory.mktemp("members")))


def carried_bytes(street: Street) -> int:
    """What has come to the hub so far."""
    return street.bed.usage("hub").received_bytes


@pytest.mark.parametrize("node", NODES)
def test_a_node_learns_from_the_relay_where_the_world_sees_it(street: Street, node: str) -> None:
    where, host = street.where[node], street.bed.hosts[node]
    ((address, port),) = where.addresses
    assert address == host.address
    assert where.observed is not None
    assert where.observed[0] == host.public_address
    keeps_ports = HOMES[node.split("-")[0]] != "symmetric"
    assert (where.observed[1] == port) == keeps_ports


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
def test_two_meet_as_their_homes_allow(street: Street, one: str, other: str, how: str) -> None:
    before_bytes = carried_bytes(street)
    accounts = street.introduce(one, other)
    through_hub_bytes = carried_bytes(street) - before_bytes
    assert [account.how for account in accounts] == [how, how], accounts
    assert all(account.letter_came for account in accounts)
    if how == "relayed":
        assert through_hub_bytes > 2 * LETTER_BYTES
    else:
        assert through_hub_bytes < LETTER_BYTES / 4
    for name, account in zip((one, other), accounts, strict=True):
        check_hint(account, show(street.where[name].addresses[0]))


def check_hint(account: Account, door: str) -> None:
    """Nothing to do about a direct link; else which port to forward, to where."""
    if account.how == "direct":
        assert account.hint == ""
        return
    port = door.rpartition(":")[2]
    assert f"forward TCP port {port} of your router to {door}" in account.hint
    expected = "may not after a router restarts" if account.how == "punched" else "through the coordinator's line"
    assert expected in account.hint


def test_a_relayed_letter_cannot_be_read_at_the_hub(street: Street) -> None:
    with street.bed.capture("hub") as wire:
        accounts = street.introduce("carl-1", "bela-1")
    assert [account.how for account in accounts] == ["relayed", "relayed"]
    assert wire.num_missed == 0
    seen = wire.bytes()
    assert len(seen) > 4 * LETTER_BYTES  # two letters, each in and out again
    assert RELAY_PROTOCOL.encode() in seen  # what TLS itself does not hide is seen
    for name in ("carl-1", "bela-1"):
        assert marked(name) not in seen
