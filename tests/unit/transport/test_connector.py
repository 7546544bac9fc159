"""Connecting to a peer: directly, by hole punching, through a relay; both ends always select the same connection."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.errors import LinkClosed, LinkTimeout
from ravnest.transport.address import Address, show
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.candidates import (
    ConnectionType,
    ConnectorConfig,
    LocalCandidates,
    PeerCandidates,
    gather_candidates,
    improvement_hint,
    order_addresses,
)
from ravnest.transport.p2p.dialer import ConnectedPeer
from ravnest.transport.p2p.endpoint import AcceptorConfig, PeerEndpoint
from ravnest.transport.p2p.relay_client import RelayInfo
from tests.unit.transport.kinds import CONFIG, DEADLINE_S, Members, Note, receive, run
from tests.unit.transport.relay_fixture import TOKEN, RelayFixture
from tests.unit.transport.tls_links import allow_all

QUICK = ConnectorConfig(
    stagger_s=0.01, punch_after_s=0.02, relay_after_s=0.05, settle_s=0.05, retry_s=0.02, max_retry_s=0.1
)
NEVER = ("192.0.2.1", 9)  # reserved for documentation: never answers


def endpoint(members: Members, name: str, host: str = "127.0.0.1", **acceptor: object) -> PeerEndpoint:
    config = AcceptorConfig(**acceptor)  # type: ignore[arg-type]
    return PeerEndpoint((host, 0), members[name], allowed=allow_all, acceptor=config, connector=QUICK)


@contextlib.contextmanager
def endpoints(members: Members, host: str = "127.0.0.1") -> Iterator[tuple[PeerEndpoint, PeerEndpoint]]:
    with endpoint(members, "left", host) as left, endpoint(members, "right", host) as right:
        yield left, right


def call(
    at: PeerEndpoint,
    peer: str,
    addresses: Sequence[Address] = (),
    *,
    observed: Address | None = None,
    relay: RelayInfo | None = None,
    purpose: str = "link",
    config: LinkConfig = CONFIG,
    local: LocalCandidates | None = None,
    deadline_s: float = DEADLINE_S,
) -> Future[ConnectedPeer]:
    info = PeerCandidates(name=peer, addresses=tuple(addresses), observed=observed, relay=relay, purpose=purpose)
    return run(at.connect, info, config, local=local, deadline_s=deadline_s)


def dead_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        host, port = gone.getsockname()
        return host, port


def check_linked(one: ConnectedPeer, other: ConnectedPeer) -> None:
    """Both hold the two ends of one connection, of the same type."""
    with one.link, other.link:
        assert one.kind == other.kind
        for sender, receiver in ((one.link, other.link), (other.link, one.link)):
            sender.send(Note(1), [b"through"], deadline_s=DEADLINE_S)
            assert receive(receiver) == (Note(1), [b"through"])


def both(left: Future[ConnectedPeer], right: Future[ConnectedPeer]) -> tuple[ConnectedPeer, ConnectedPeer]:
    return left.result(2 * DEADLINE_S), right.result(2 * DEADLINE_S)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_dial_directly(members: Members, host: str) -> None:
    with endpoints(members, host) as (left, right):
        reached = both(call(left, "right", [right.address]), call(right, "left", [left.address]))
        assert reached[0].kind == "direct"
        assert reached[0].link.peer == "right"
        assert reached[1].link.peer == "left"
        assert "dialed" in reached[0].reason
        assert reached[0].hint == ""
        check_linked(*reached)


@pytest.mark.parametrize("dialing", ["left", "right"])
def test_one_reachable_node_is_enough(members: Members, dialing: str) -> None:
    with endpoints(members) as (left, right):
        at_left = call(left, "right", [right.address] if dialing == "left" else [dead_address(), NEVER])
        at_right = call(right, "left", [left.address] if dialing == "right" else [])
        reached = both(at_left, at_right)
        assert reached[0].kind == "direct"
        check_linked(*reached)


def test_the_nodes_may_connect_at_different_times(members: Members) -> None:
    """A plan arrives at different times: an early connection is held by the acceptor."""
    for first in ("left", "right"):
        with endpoints(members) as (left, right):
            known = {"left": (left, "right", [right.address]), "right": (right, "left", [left.address])}
            second = "right" if first == "left" else "left"
            early = call(*known[first])
            with pytest.raises(TimeoutError):
                early.result(0.1)
            late = call(*known[second][:2])  # it has no address to dial
            check_linked(early.result(DEADLINE_S), late.result(DEADLINE_S))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_punching_with_observed_addresses_only(members: Members, host: str) -> None:
    """Each dials the other's port from its own, before any other candidate of that address is checked."""
    config = ConnectorConfig(stagger_s=DEADLINE_S, punch_after_s=0, retry_s=0.02)
    with (
        PeerEndpoint((host, 0), members["left"], allowed=allow_all, connector=config) as left,
        PeerEndpoint((host, 0), members["right"], allowed=allow_all, connector=config) as right,
    ):
        near = LocalCandidates(addresses=(("127.0.0.1", 1),))  # so that the dead address is checked first
        dead = [dead_address()]
        reached = both(
            call(left, "right", dead, observed=right.address, local=near),
            call(right, "left", dead, observed=left.address, local=near),
        )
        assert reached[0].kind == "punched"
        assert "to prevent that, forward TCP port" in reached[0].hint
        check_linked(*reached)


@pytest.fixture
def relay(members: Members) -> Iterator[RelayFixture]:
    with RelayFixture(members) as server:
        yield server


def test_the_relay_is_used_when_all_else_fails(members: Members, relay: RelayFixture) -> None:
    info = relay.open()
    with endpoints(members) as (left, right):
        dead = [dead_address(), NEVER]
        reached = both(call(left, "right", dead, relay=info), call(right, "left", dead, relay=info))
        assert reached[0].kind == "relayed"
        assert f"through coordinator at {show(info.address)}" in reached[0].reason
        assert "Connection refused; direct 192.0.2.1:9: " in reached[0].reason
        assert f"forward TCP port {left.address[1]} of your router" in reached[0].hint
        check_linked(*reached)


def test_a_direct_connection_is_preferred_to_the_relay(members: Members, relay: RelayFixture) -> None:
    info = relay.open()
    with endpoints(members) as (left, right):
        for _ in range(5):
            reached = both(call(left, "right", [right.address], relay=info), call(right, "left", relay=info))
            assert reached[0].kind == "direct"
            check_linked(*reached)


def test_an_unresolvable_relay_does_not_prevent_a_direct_connection(members: Members) -> None:
    nowhere = RelayInfo(address=("no-such-host.invalid", 7700), token=TOKEN)
    with endpoints(members) as (left, right):
        reached = both(call(left, "right", [right.address], relay=nowhere), call(right, "left"))
        check_linked(*reached)
        with pytest.raises(LinkTimeout, match=r"relayed no-such-host\.invalid:7700: cannot resolve"):
            call(left, "right", relay=nowhere, deadline_s=1.0).result(DEADLINE_S)


def test_the_relay_observes_an_endpoint(members: Members, relay: RelayFixture) -> None:
    with (
        endpoint(members, "left") as left,
        contextlib.closing(left.observe(relay.info(), deadline_s=DEADLINE_S)) as seen,
    ):
        assert seen.observed == seen.local == left.address
    with endpoint(members, "left", host="::") as dual_stack:
        seen = dual_stack.observe(relay.info(), deadline_s=DEADLINE_S)
        with contextlib.closing(seen):
            assert seen.observed == ("127.0.0.1", dual_stack.address[1])


@dataclass(frozen=True)
class Round:
    """Which addresses each node knows, and when it checks its candidates."""

    left_knows: bool
    right_knows: bool
    relayed: bool
    left_first: bool
    left: ConnectorConfig
    right: ConnectorConfig


def draw_config(rng: random.Random) -> ConnectorConfig:
    return ConnectorConfig(
        stagger_s=rng.choice([0.0, 0.002, 0.01]),
        punch_after_s=rng.choice([0.0, 0.003]),
        relay_after_s=rng.choice([0.0, 0.005, 0.02]),
        settle_s=rng.choice([0.0, 0.005]),
        retry_s=0.005,
        max_retry_s=0.05,
    )


def draw_round(seed: int) -> Round:
    rng = random.Random(seed)
    knows = rng.choice([(True, True), (True, False), (False, True), (False, False)])
    relayed = rng.random() < 0.5 or not any(knows)
    return Round(*knows, relayed, rng.random() < 0.5, draw_config(rng), draw_config(rng))


def play(round_: Round, members: Members, info: RelayInfo) -> ConnectionType:
    """Connect the two and check that they hold the same connection."""
    with (
        PeerEndpoint(("127.0.0.1", 0), members["left"], allowed=allow_all, connector=round_.left) as left,
        PeerEndpoint(("127.0.0.1", 0), members["right"], allowed=allow_all, connector=round_.right) as right,
    ):
        relay = info if round_.relayed else None
        observed = {"left": left.address if round_.right_knows else None}
        observed["right"] = right.address if round_.left_knows else None
        pairs = [(left, "right"), (right, "left")]
        futures = {
            peer: call(at, peer, [dead_address()], observed=observed[peer], relay=relay)
            for at, peer in (pairs if round_.left_first else reversed(pairs))
        }
        reached = both(futures["right"], futures["left"])
        check_linked(*reached)
        return reached[0].kind


def test_both_ends_agree_in_any_order_of_events(members: Members, relay: RelayFixture) -> None:
    """All candidates at random times: never two different connections, never a hang."""
    info = relay.open()
    assert {play(draw_round(seed), members, info) for seed in range(40)} >= {"direct", "relayed"}


def test_several_links_between_the_same_nodes(members: Members) -> None:
    with endpoints(members) as (left, right):
        calls = [
            (call(left, "right", [right.address], purpose=p), call(right, "left", [left.address], purpose=p))
            for p in ("forward", "ring", "weights")
        ]
        for one, other in calls:
            check_linked(*both(one, other))


def test_an_endpoint_connects_several_peers(members: Members) -> None:
    with endpoint(members, "hub") as hub, contextlib.ExitStack() as stack:
        names = ["a", "b", "c", "z"]
        near = [call(hub, name) for name in names]
        peers = [stack.enter_context(endpoint(members, name)) for name in names]
        far = [call(peer, "hub", [hub.address]) for peer in peers]
        for one, other in zip(near, far, strict=True):
            check_linked(*both(one, other))


def test_links_outlive_the_endpoint(members: Members) -> None:
    with endpoints(members) as (left, right):
        reached = both(call(left, "right", [right.address]), call(right, "left"))
    check_linked(*reached)


def test_another_generation_is_rejected_on_both_sides(members: Members) -> None:
    rejections: queue.Queue[str] = queue.Queue()
    older = LinkConfig(headers=Note, generation=6)
    with (
        endpoint(members, "left") as left,
        endpoint(members, "right", on_rejected=lambda address, reason: rejections.put(reason)) as right,
    ):
        one = call(left, "right", [right.address], config=older, deadline_s=1.0)
        other = call(right, "left", deadline_s=1.0)
        with pytest.raises(LinkTimeout, match="right is of generation 7, this node of generation 6"):
            one.result(DEADLINE_S)
        with pytest.raises(LinkTimeout, match="left is of generation 6, this node of generation 7"):
            other.result(DEADLINE_S)
        assert "of generation 6" in rejections.get(timeout=DEADLINE_S)
        reached = both(call(left, "right", [right.address]), call(right, "left"))  # once both have the same
        check_linked(*reached)


def test_a_node_outside_the_roster_is_rejected(members: Members) -> None:
    rejections: queue.Queue[str] = queue.Queue()
    config = AcceptorConfig(on_rejected=lambda address, reason: rejections.put(reason))
    roster = PeerEndpoint(
        ("127.0.0.1", 0), members["right"], allowed=lambda name: name == "left", acceptor=config, connector=QUICK
    )
    with roster as right, endpoint(members, "kicked") as kicked:
        with pytest.raises(LinkTimeout, match="right rejected"):
            call(kicked, "right", [right.address], deadline_s=1.0).result(DEADLINE_S)
        assert rejections.get(timeout=DEADLINE_S) == "kicked is not allowed on this link"


def test_a_stranger_and_the_wrong_node_are_rejected(members: Members, tmp_path: Path) -> None:
    rejections: queue.Queue[str] = queue.Queue()
    stranger = Members(tmp_path)
    with (
        endpoint(members, "right", on_rejected=lambda address, reason: rejections.put(reason)) as right,
        endpoint(stranger, "left") as outside,
        endpoint(members, "left") as left,
    ):
        with pytest.raises(LinkTimeout, match="authenticated"):
            call(outside, "right", [right.address], deadline_s=1.0).result(DEADLINE_S)
        assert "authenticated" in rejections.get(timeout=DEADLINE_S)
        with pytest.raises(LinkTimeout, match="right is not allowed"):  # another LAN has the same addresses
            call(left, "third", [right.address], deadline_s=1.0).result(DEADLINE_S)
        with pytest.raises(LinkTimeout, match="left is not allowed"):  # and so may this node's own
            call(left, "third", [left.address], deadline_s=1.0).result(DEADLINE_S)
        check_linked(*both(call(left, "right", [right.address]), call(right, "left")))


def test_garbage_and_silence_do_not_block_others(members: Members) -> None:
    rejections: queue.Queue[str] = queue.Queue()
    busy = endpoint(
        members,
        "right",
        max_handshakes=8,
        handshake_timeout_s=0.3,
        on_rejected=lambda address, reason: rejections.put(reason),
    )
    with busy as right, endpoint(members, "left") as left, contextlib.ExitStack() as stack:
        for i in range(100):
            sock = stack.enter_context(socket.create_connection(right.address))
            sock.sendall([b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16garbage", b"RVNP"][i % 4])
        check_linked(*both(call(left, "right", [right.address]), call(right, "left")))
        reasons = {rejections.get(timeout=DEADLINE_S) for _ in range(100)}
        assert any("slowest of more than" in reason for reason in reasons)
        assert any("unknown protocol" in reason for reason in reasons)
        assert any("no introduction within" in reason for reason in reasons)


def test_unexpected_connections_are_closed_after_a_while(members: Members) -> None:
    rejections: queue.Queue[str] = queue.Queue()
    short = endpoint(members, "right", hold_timeout_s=0.1, on_rejected=lambda address, reason: rejections.put(reason))
    with short as right, endpoint(members, "left") as left:
        calling = call(left, "right", [right.address])
        assert "did not connect to the peer" in rejections.get(timeout=DEADLINE_S)
        check_linked(*both(calling, call(right, "left")))  # the peer retries


def test_a_newer_call_replaces_the_older(members: Members) -> None:
    with endpoints(members) as (left, right):
        older = call(left, "right", [NEVER])
        with pytest.raises(TimeoutError):
            older.result(0.05)
        newer = call(left, "right", [right.address])
        with pytest.raises(LinkClosed, match="newer connection attempt"):
            older.result(DEADLINE_S)
        check_linked(*both(newer, call(right, "left")))


def test_closing_an_endpoint_ends_its_calls(members: Members) -> None:
    left = endpoint(members, "left")
    calling = call(left, "right", [NEVER])
    with pytest.raises(TimeoutError):
        calling.result(0.05)
    left.close()
    left.close()
    with pytest.raises(LinkClosed, match="endpoint closed locally"):
        calling.result(DEADLINE_S)
    with pytest.raises(LinkClosed, match="endpoint closed locally"):
        call(left, "right").result(DEADLINE_S)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(left.address, timeout=DEADLINE_S)


def test_no_descriptor_is_leaked(members: Members, relay: RelayFixture) -> None:
    info = relay.open()

    def once() -> None:
        with endpoints(members) as (left, right):
            dead = [dead_address()]
            for known in ([right.address], [right.address, *dead], dead):
                check_linked(*both(call(left, "right", known, relay=info), call(right, "left", dead, relay=info)))
            with pytest.raises(LinkTimeout):
                call(left, "right", [right.address], deadline_s=0.1).result(DEADLINE_S)

    once()
    relay.wait_empty()
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        once()
    relay.wait_empty()
    assert len(os.listdir("/dev/fd")) <= before


def test_local_addresses_first_then_public_ones() -> None:
    local = LocalCandidates(addresses=(("192.168.1.5", 1), ("2001:db8:0:1::5", 1)), observed=("8.8.8.8", 1))
    there = (("10.9.8.7", 2), ("192.168.1.9", 2), ("2606:4700::1", 2), ("1.1.1.1", 2))
    elsewhere = PeerCandidates(name="b", addresses=there, observed=("9.9.9.9", 2))
    assert [host for host, _ in order_addresses(elsewhere, local)] == [
        "192.168.1.9",
        "2606:4700::1",
        "1.1.1.1",
        "9.9.9.9",
        "10.9.8.7",
    ]
    same_nat = PeerCandidates(name="b", addresses=there[:2], observed=("8.8.8.8", 2))
    assert [host for host, _ in order_addresses(same_nat, local)] == ["10.9.8.7", "192.168.1.9", "8.8.8.8"]


hosts = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
addresses = st.tuples(hosts, st.integers(1, 65535))


@settings(deadline=None)
@given(st.lists(addresses, max_size=30), st.none() | addresses, st.lists(addresses, max_size=3), st.booleans())
def test_every_candidate_is_listed_once_and_in_order(
    known: list[Address], observed: Address | None, mine: list[Address], punch: bool
) -> None:
    peer = PeerCandidates(name="b", addresses=tuple(known), observed=observed, punch=punch)
    candidates = gather_candidates(peer, LocalCandidates(addresses=tuple(mine)), ConnectorConfig())
    assert len(set(candidates)) == len(candidates)
    direct = [candidate.address for candidate in candidates if candidate.kind == "direct"]
    assert len(direct) == min(16, len({*known, *([observed] if observed else [])}))
    assert set(direct) <= {*known, observed}
    assert [candidate.after_s for candidate in candidates] == sorted(candidate.after_s for candidate in candidates)
    assert any(candidate.kind == "punched" for candidate in candidates) == (punch and observed is not None)


def test_hints_name_the_port_to_forward() -> None:
    local = LocalCandidates(addresses=(("192.168.1.5", 7701),))
    assert improvement_hint("direct", "b", 7701, local) == ""
    indirect: list[ConnectionType] = ["punched", "relayed"]
    for how in indirect:
        assert "forward TCP port 7701 of your router to 192.168.1.5:7701" in improvement_hint(how, "b", 7701, local)


def test_invalid_config_is_rejected() -> None:
    with pytest.raises(ValueError, match="port"):
        PeerCandidates(name="b", addresses=(("1.2.3.4", 0),))
    with pytest.raises(ValueError, match="does not appear to be"):
        PeerCandidates(name="b", addresses=(("a-name", 1),))
    with pytest.raises(ValueError, match="check_timeout_s"):
        ConnectorConfig(check_timeout_s=0)
    with pytest.raises(ValueError, match="hold_timeout_s"):
        AcceptorConfig(hold_timeout_s=0)


def test_a_node_has_no_link_to_itself(members: Members) -> None:
    with endpoint(members, "left") as left, pytest.raises(ValueError, match="itself"):
        call(left, "left", [left.address]).result(DEADLINE_S)
