"""Reaching a peer: directly, by punching, through a relay; and that both ends always hold the same connection."""

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

from ravnest.core.errors import LinkClosed, LinkTimeout
from ravnest.net.addresses import Address, show
from ravnest.net.door import Door
from ravnest.net.link import LinkConfig
from ravnest.net.reach import Reached
from ravnest.net.reception import ReceptionConfig
from ravnest.net.tunnel import RelayInfo
from ravnest.net.ways import Here, How, PeerInfo, ReachConfig, advise, choose_ways, order_addresses
from tests.net.kinds import CONFIG, DEADLINE_S, Members, Note, receive, run
from tests.net.relaying import TOKEN, RelayServer

pytestmark = pytest.mark.timeout(60)

QUICK = ReachConfig(
    stagger_s=0.01, punch_after_s=0.02, relay_after_s=0.05, settle_s=0.05, retry_s=0.02, max_retry_s=0.1
)
NEVER = ("192.0.2.1", 9)  # reserved for examples: nobody answers there


def everybody(name: str) -> bool:
    return True


def door(members: Members, name: str, host: str = "127.0.0.1", **reception: object) -> Door:
    config = ReceptionConfig(**reception)  # type: ignore[arg-type]
    return Door((host, 0), members[name], allowed=everybody, reception=config, reach=QUICK)


@contextlib.contextmanager
def doors(members: Members, host: str = "127.0.0.1") -> Iterator[tuple[Door, Door]]:
    with door(members, "left", host) as left, door(members, "right", host) as right:
        yield left, right


def call(
    at: Door,
    peer: str,
    addresses: Sequence[Address] = (),
    *,
    observed: Address | None = None,
    relay: RelayInfo | None = None,
    purpose: str = "link",
    config: LinkConfig = CONFIG,
    here: Here | None = None,
    deadline_s: float = DEADLINE_S,
) -> Future[Reached]:
    info = PeerInfo(name=peer, addresses=tuple(addresses), observed=observed, relay=relay, purpose=purpose)
    return run(at.reach, info, config, here=here, deadline_s=deadline_s)


def dead_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        host, port = gone.getsockname()
        return host, port


def check_linked(one: Reached, other: Reached) -> None:
    """Both hold the two ends of one connection, and say the same about how it came about."""
    with one.link, other.link:
        assert one.how == other.how
        for sender, receiver in ((one.link, other.link), (other.link, one.link)):
            sender.send(Note(1), [b"through"], deadline_s=DEADLINE_S)
            assert receive(receiver) == (Note(1), [b"through"])


def both(left: Future[Reached], right: Future[Reached]) -> tuple[Reached, Reached]:
    return left.result(2 * DEADLINE_S), right.result(2 * DEADLINE_S)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_dial_directly(members: Members, host: str) -> None:
    with doors(members, host) as (left, right):
        reached = both(call(left, "right", [right.address]), call(right, "left", [left.address]))
        assert reached[0].how == "direct"
        assert reached[0].link.peer == "right"
        assert reached[1].link.peer == "left"
        assert "dialled" in reached[0].reason
        assert reached[0].hint == ""
        check_linked(*reached)


@pytest.mark.parametrize("dialling", ["left", "right"])
def test_one_that_can_be_dialled_is_enough(members: Members, dialling: str) -> None:
    with doors(members) as (left, right):
        at_left = call(left, "right", [right.address] if dialling == "left" else [dead_address(), NEVER])
        at_right = call(right, "left", [left.address] if dialling == "right" else [])
        reached = both(at_left, at_right)
        assert reached[0].how == "direct"
        check_linked(*reached)


def test_the_first_to_be_called_may_be_early_or_late(members: Members) -> None:
    """A plan reaches the nodes at different moments: who comes early waits at the other's door."""
    for first in ("left", "right"):
        with doors(members) as (left, right):
            known = {"left": (left, "right", [right.address]), "right": (right, "left", [left.address])}
            second = "right" if first == "left" else "left"
            early = call(*known[first])
            with pytest.raises(TimeoutError):
                early.result(0.1)
            late = call(*known[second][:2])  # it has no address to dial
            check_linked(early.result(DEADLINE_S), late.result(DEADLINE_S))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_punching_when_both_only_know_what_the_world_sees(members: Members, host: str) -> None:
    """Each dials from its own port what the other listens on, before any other way is tried there."""
    patient = ReachConfig(stagger_s=DEADLINE_S, punch_after_s=0, retry_s=0.02)
    with (
        Door((host, 0), members["left"], allowed=everybody, reach=patient) as left,
        Door((host, 0), members["right"], allowed=everybody, reach=patient) as right,
    ):
        near = Here(addresses=(("127.0.0.1", 1),))  # so that the dead address comes first
        dead = [dead_address()]
        reached = both(
            call(left, "right", dead, observed=right.address, here=near),
            call(right, "left", dead, observed=left.address, here=near),
        )
        assert reached[0].how == "punched"
        assert "to be sure, forward TCP port" in reached[0].hint
        check_linked(*reached)


@pytest.fixture
def relay(members: Members) -> Iterator[RelayServer]:
    with RelayServer(members) as server:
        yield server


def test_the_relay_when_nothing_else_works(members: Members, relay: RelayServer) -> None:
    info = relay.open()
    with doors(members) as (left, right):
        dead = [dead_address(), NEVER]
        reached = both(call(left, "right", dead, relay=info), call(right, "left", dead, relay=info))
        assert reached[0].how == "relayed"
        assert f"through coordinator at {show(info.address)}" in reached[0].reason
        assert "Connection refused; direct 192.0.2.1:9: " in reached[0].reason
        assert f"forward TCP port {left.address[1]} of your router" in reached[0].hint
        check_linked(*reached)


def test_a_direct_way_is_better_than_the_relay(members: Members, relay: RelayServer) -> None:
    info = relay.open()
    with doors(members) as (left, right):
        for _ in range(5):
            reached = both(call(left, "right", [right.address], relay=info), call(right, "left", relay=info))
            assert reached[0].how == "direct"
            check_linked(*reached)


def test_a_relay_by_name_that_is_not_there_is_only_one_way_less(members: Members) -> None:
    nowhere = RelayInfo(address=("no-such-host.invalid", 7700), token=TOKEN)
    with doors(members) as (left, right):
        reached = both(call(left, "right", [right.address], relay=nowhere), call(right, "left"))
        check_linked(*reached)
        with pytest.raises(LinkTimeout, match=r"relayed no-such-host\.invalid:7700: .* cannot be found"):
            call(left, "right", relay=nowhere, deadline_s=0.5).result(DEADLINE_S)


def test_where_the_relay_sees_a_door(members: Members, relay: RelayServer) -> None:
    with door(members, "left") as left, contextlib.closing(left.observe(relay.relay(), deadline_s=DEADLINE_S)) as seen:
        assert seen.seen == seen.local == left.address
    with door(members, "left", host="::") as both_kinds:
        seen = both_kinds.observe(relay.relay(), deadline_s=DEADLINE_S)
        with contextlib.closing(seen):
            assert seen.seen == ("127.0.0.1", both_kinds.address[1])


@dataclass(frozen=True)
class Round:
    """Who knows what, and when each tries its ways."""

    left_knows: bool
    right_knows: bool
    relayed: bool
    left_first: bool
    left: ReachConfig
    right: ReachConfig


def draw_config(rng: random.Random) -> ReachConfig:
    return ReachConfig(
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


def play(round_: Round, members: Members, info: RelayInfo) -> How:
    """The two call each other; checks that they hold the same connection."""
    with (
        Door(("127.0.0.1", 0), members["left"], allowed=everybody, reach=round_.left) as left,
        Door(("127.0.0.1", 0), members["right"], allowed=everybody, reach=round_.right) as right,
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
        return reached[0].how


def test_both_ends_agree_whatever_the_order_of_things(members: Members, relay: RelayServer) -> None:
    """All ways at once, at random moments: never two different connections, never a hang."""
    info = relay.open()
    assert {play(draw_round(seed), members, info) for seed in range(40)} >= {"direct", "relayed"}


def test_several_links_between_the_same_two(members: Members) -> None:
    with doors(members) as (left, right):
        calls = [
            (call(left, "right", [right.address], purpose=p), call(right, "left", [left.address], purpose=p))
            for p in ("forward", "ring", "weights")
        ]
        for one, other in calls:
            check_linked(*both(one, other))


def test_the_door_stays_open_for_the_next(members: Members) -> None:
    with door(members, "hub") as hub, contextlib.ExitStack() as stack:
        names = ["a", "b", "c", "z"]
        near = [call(hub, name) for name in names]
        peers = [stack.enter_context(door(members, name)) for name in names]
        far = [call(peer, "hub", [hub.address]) for peer in peers]
        for one, other in zip(near, far, strict=True):
            check_linked(*both(one, other))


def test_links_outlive_the_door(members: Members) -> None:
    with doors(members) as (left, right):
        reached = both(call(left, "right", [right.address]), call(right, "left"))
    check_linked(*reached)


def test_another_generation_is_refused_on_both_sides(members: Members) -> None:
    refusals: queue.Queue[str] = queue.Queue()
    older = LinkConfig(headers=Note, generation=6)
    with (
        door(members, "left") as left,
        door(members, "right", on_refused=lambda address, reason: refusals.put(reason)) as right,
    ):
        one = call(left, "right", [right.address], config=older, deadline_s=0.5)
        other = call(right, "left", deadline_s=0.5)
        with pytest.raises(LinkTimeout, match="right is of generation 7, this node of generation 6"):
            one.result(DEADLINE_S)
        with pytest.raises(LinkTimeout, match="left is of generation 6, this node of generation 7"):
            other.result(DEADLINE_S)
        assert "of generation 6" in refusals.get(timeout=DEADLINE_S)
        reached = both(call(left, "right", [right.address]), call(right, "left"))  # once both have the same
        check_linked(*reached)


def test_who_is_not_in_the_roster_is_refused(members: Members) -> None:
    refusals: queue.Queue[str] = queue.Queue()
    tell = ReceptionConfig(on_refused=lambda address, reason: refusals.put(reason))
    roster = Door(("127.0.0.1", 0), members["right"], allowed=lambda name: name == "left", reception=tell, reach=QUICK)
    with roster as right, door(members, "kicked") as kicked:
        with pytest.raises(LinkTimeout, match="right does not accept"):
            call(kicked, "right", [right.address], deadline_s=0.3).result(DEADLINE_S)
        assert refusals.get(timeout=DEADLINE_S) == "kicked is not allowed on this link"


def test_a_stranger_and_the_wrong_node_are_refused(members: Members, tmp_path: Path) -> None:
    refusals: queue.Queue[str] = queue.Queue()
    stranger = Members(tmp_path)
    with (
        door(members, "right", on_refused=lambda address, reason: refusals.put(reason)) as right,
        door(stranger, "left") as outside,
        door(members, "left") as left,
    ):
        with pytest.raises(LinkTimeout, match="authenticated"):
            call(outside, "right", [right.address], deadline_s=0.3).result(DEADLINE_S)
        assert "authenticated" in refusals.get(timeout=DEADLINE_S)
        with pytest.raises(LinkTimeout, match="right is not allowed"):  # somebody else's LAN has the same addresses
            call(left, "third", [right.address], deadline_s=0.3).result(DEADLINE_S)
        with pytest.raises(LinkTimeout, match="left is not allowed"):  # and so may one's own
            call(left, "third", [left.address], deadline_s=0.3).result(DEADLINE_S)
        check_linked(*both(call(left, "right", [right.address]), call(right, "left")))


def test_garbage_and_silence_at_the_door_keep_nobody_out(members: Members) -> None:
    refusals: queue.Queue[str] = queue.Queue()
    busy = door(
        members, "right", max_greetings=8, greeting_s=0.3, on_refused=lambda address, reason: refusals.put(reason)
    )
    with busy as right, door(members, "left") as left, contextlib.ExitStack() as stack:
        for i in range(100):
            sock = stack.enter_context(socket.create_connection(right.address))
            sock.sendall([b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16garbage", b"RVNP"][i % 4])
        check_linked(*both(call(left, "right", [right.address]), call(right, "left")))
        reasons = {refusals.get(timeout=DEADLINE_S) for _ in range(100)}
        assert any("slowest of too many" in reason for reason in reasons)
        assert any("not one of a node" in reason for reason in reasons)
        assert any("did not introduce itself" in reason for reason in reasons)


def test_guests_nobody_calls_for_are_let_go(members: Members) -> None:
    refusals: queue.Queue[str] = queue.Queue()
    impatient = door(members, "right", hold_s=0.1, on_refused=lambda address, reason: refusals.put(reason))
    with impatient as right, door(members, "left") as left:
        calling = call(left, "right", [right.address])
        assert "nobody called for it" in refusals.get(timeout=DEADLINE_S)
        check_linked(*both(calling, call(right, "left")))  # it came again


def test_a_newer_call_ends_the_older(members: Members) -> None:
    with doors(members) as (left, right):
        older = call(left, "right", [NEVER])
        with pytest.raises(TimeoutError):
            older.result(0.05)
        newer = call(left, "right", [right.address])
        with pytest.raises(LinkClosed, match="newer call"):
            older.result(DEADLINE_S)
        check_linked(*both(newer, call(right, "left")))


def test_a_closed_door_ends_its_calls(members: Members) -> None:
    left = door(members, "left")
    calling = call(left, "right", [NEVER])
    with pytest.raises(TimeoutError):
        calling.result(0.05)
    left.close()
    left.close()
    with pytest.raises(LinkClosed, match="door was closed"):
        calling.result(DEADLINE_S)
    with pytest.raises(LinkClosed, match="door was closed"):
        call(left, "right").result(DEADLINE_S)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(left.address, timeout=DEADLINE_S)


def test_nothing_is_left_open(members: Members, relay: RelayServer) -> None:
    info = relay.open()

    def once() -> None:
        with doors(members) as (left, right):
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


def test_near_addresses_first_then_what_the_world_sees() -> None:
    here = Here(addresses=(("192.168.1.5", 1), ("2001:db8:0:1::5", 1)), observed=("8.8.8.8", 1))
    there = (("10.9.8.7", 2), ("192.168.1.9", 2), ("2606:4700::1", 2), ("1.1.1.1", 2))
    elsewhere = PeerInfo(name="b", addresses=there, observed=("9.9.9.9", 2))
    assert [host for host, _ in order_addresses(elsewhere, here)] == [
        "192.168.1.9",
        "2606:4700::1",
        "1.1.1.1",
        "9.9.9.9",
        "10.9.8.7",
    ]
    same_home = PeerInfo(name="b", addresses=there[:2], observed=("8.8.8.8", 2))
    assert [host for host, _ in order_addresses(same_home, here)] == ["10.9.8.7", "192.168.1.9", "8.8.8.8"]


hosts = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
addresses = st.tuples(hosts, st.integers(1, 65535))


@settings(deadline=None)
@given(st.lists(addresses, max_size=30), st.none() | addresses, st.lists(addresses, max_size=3), st.booleans())
def test_every_way_is_tried_once_and_in_time(
    known: list[Address], observed: Address | None, mine: list[Address], punch: bool
) -> None:
    peer = PeerInfo(name="b", addresses=tuple(known), observed=observed, punch=punch)
    ways = choose_ways(peer, Here(addresses=tuple(mine)), ReachConfig())
    assert len(set(ways)) == len(ways)
    direct = [way.address for way in ways if way.how == "direct"]
    assert len(direct) == min(16, len({*known, *([observed] if observed else [])}))
    assert set(direct) <= {*known, observed}
    assert [way.after_s for way in ways] == sorted(way.after_s for way in ways)
    assert any(way.how == "punched" for way in ways) == (punch and observed is not None)


def test_advice_names_what_to_do() -> None:
    here = Here(addresses=(("192.168.1.5", 7701),))
    assert advise("direct", "b", 7701, here) == ""
    ways: list[How] = ["punched", "relayed"]
    for how in ways:
        assert "forward TCP port 7701 of your router to 192.168.1.5:7701" in advise(how, "b", 7701, here)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="port"):
        PeerInfo(name="b", addresses=(("1.2.3.4", 0),))
    with pytest.raises(ValueError, match="does not appear to be"):
        PeerInfo(name="b", addresses=(("a-name", 1),))
    with pytest.raises(ValueError, match="try_s"):
        ReachConfig(try_s=0)
    with pytest.raises(ValueError, match="hold_s"):
        ReceptionConfig(hold_s=0)


def test_a_node_has_no_link_to_itself(members: Members) -> None:
    with door(members, "left") as left, pytest.raises(ValueError, match="itself"):
        call(left, "left", [left.address]).result(DEADLINE_S)
