"""Malicious members: outdated, repeated, oversized, invalid and false messages. Others continue training."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ravnest.errors import LinkError
from ravnest.node.client import Client, member_context
from ravnest.protocol.commands import EvaluationReport, LinkReport, LossReport, StageFailed
from ravnest.protocol.control import (
    MAX_MESSAGE_BYTES,
    AddressChanged,
    Assignment,
    DesiredAssignment,
    Disconnect,
    Heartbeat,
    Hello,
    NodeProfile,
    ProfileChanged,
    StageReport,
)
from ravnest.protocol.peer import PeerAddresses as Where
from tests.unit.coordinator.attacks import RunningCoordinator, coordinator_with_nodes, run, running_coordinator
from tests.unit.coordinator.clients import PROFILE, FakeNode

pytestmark = pytest.mark.timeout(60)

CLOSED = (OSError, EOFError, LinkError)
HELLO = Hello(release="test", profile=PROFILE, addresses=Where())


async def all_handled(server: RunningCoordinator, node: FakeNode) -> None:
    """Messages are handled in order, so wait for the last."""
    await node.send(Heartbeat("all sent"))
    last_seen = server.coordinator.state.liveness.last_seen
    await server.until(lambda: last_seen[node.name].activity == "all sent", "all messages are handled")


# Outdated and repeated messages.


def test_reports_of_another_generation_are_dropped(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            ann, now = server.nodes_by_name["ann"], server.nodes_by_name["ann"].assignment.generation
            for generation in (now - 1, now + 1, 2**63):
                await ann.send(StageReport(generation, StageFailed("a failure of another time")))
                await ann.send(StageReport(generation, LossReport({0: (1.0,)})))
            await all_handled(server, ann)
            assert not any("another time" in text for text in server.log)
            assert not server.requester.reports
            assert server.coordinator.state.nodes["ann"].quarantined_s is None

    run(test())


def test_the_cause_of_a_failure_may_arrive_after_its_consequence(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_coordinator(tmp_path) as server, contextlib.AsyncExitStack() as stack:
            ann, bob = [await stack.enter_async_context(await server.node(name)) for name in ("ann", "bob")]
            await server.train()
            generation = ann.assignment.generation
            await bob.send(StageReport(generation, StageFailed("lost the link to ann", is_consequence=True)))
            await server.wait_for_log("bob (stage 1) failed: lost the link to ann")
            for _ in range(3):
                await ann.send(StageReport(generation, StageFailed("IndexError: index out of range")))
            await all_handled(server, ann)
            assert sum("ann is quarantined: IndexError" in text for text in server.log) == 1
            assert server.coordinator.state.nodes["bob"].quarantined_s is None
            await stack.enter_async_context(await server.node("carl"))
            await server.train()
            assert set(server.cluster_of("bob").plan.members) == {"bob", "carl"}

    run(test())


def test_repeated_messages_are_logged_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            bob, part = server.nodes_by_name["bob"], server.nodes_by_name["bob"].assignment
            for _ in range(100):
                await bob.report_ready(part)
                await bob.send(StageReport(part.generation, LinkReport("ann", "direct", "it was dialled")))
                await bob.send(AddressChanged(Where((("10.0.0.1", 5),))))
            await all_handled(server, bob)
            assert sum("bob is ready" in text for text in server.log) == 1
            assert sum("bob has a direct link" in text for text in server.log) == 1

    run(test())


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (HELLO, "got a second one"),
        (StageReport(1, LossReport({0: (1.0,)})), "only the last stage sends a LossReport"),
        (StageReport(1, LinkReport("mallory", "direct", "")), "a link to a node outside its cluster"),
        (AddressChanged(Where((("not an address", 1),))), "does not appear to be an IPv4 or IPv6 address"),
        (AddressChanged(Where((), ("127.0.0.1", 0))), "port must be between"),
    ],
)
def test_an_invalid_message_ends_the_session_and_not_training(tmp_path: Path, message: Any, reason: str) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            ann = server.nodes_by_name["ann"]
            await ann.send(message)
            disconnect = await ann.receive(Disconnect)
            assert disconnect.may_reconnect
            assert reason in disconnect.reason
            await server.wait_for_log("the connection to ann ended", reason)
            again = FakeNode(ann.identity, server.address)
            again.holding = ann.holding
            async with again:
                await again.receive(DesiredAssignment, lambda received: received.assignment is not None)
                await server.train()
                assert again.assignment.generation == 1, "it is the same cluster"

    run(test())


def test_a_node_may_offer_other_resources_while_it_trains(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            ann, state = server.nodes_by_name["ann"], server.coordinator.state
            less = NodeProfile(memory_bytes=PROFILE.memory_bytes // 2, gflops=PROFILE.gflops / 2)
            for _ in range(3):
                await ann.send(ProfileChanged(less))
            await all_handled(server, ann)
            assert state.nodes["ann"].profile == less
            assert sum("ann offers " in text for text in server.log) == 1
            await server.train()
            assert ann.assignment.generation == 1, "it is the same cluster"

    run(test())


def test_results_of_unknown_evaluations_are_rejected(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            bob = server.nodes_by_name["bob"]
            await bob.send(StageReport(1, EvaluationReport(0, 1, (0.0,))))
            assert "was not sent" in (await bob.receive(Disconnect)).reason
            assert not server.requester.reports
            bob.received.clear()

    run(test())


# Undecodable messages.


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (msgspec.msgpack.encode(msgspec.structs.replace(HELLO, release="x" * MAX_MESSAGE_BYTES)), "invalid message"),
        (b"\xc1garbage", "invalid message"),
        (b"\x91" * 100_000, "invalid message"),
        (msgspec.msgpack.encode({"type": "Disconnect", "reason": ""}), "invalid message"),
        (msgspec.msgpack.encode(Heartbeat("first")), "expected a hello"),
    ],
    ids=["oversize", "garbage", "nested", "the other side's", "no hello"],
)
def test_invalid_first_messages_are_rejected(tmp_path: Path, message: bytes, sentence: str) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            async with Client(server.address, member_context(await server.enroll("mallory"))) as client:
                socket = await client.connect("/v1/control", max_message_bytes=MAX_MESSAGE_BYTES)
                await socket.send_bytes(message)
                async for _ in socket:
                    pass
                assert socket.closed
            await server.wait_for_log("rejected mallory at 127.0.0.1", sentence)
            assert "mallory" not in server.coordinator.state.nodes

    run(test())


# False profiles and addresses.

HONEST = msgspec.to_builtins(HELLO)
LIES: list[tuple[dict[str, Any], str]] = [
    ({"profile": {**HONEST["profile"], "memory_bytes": 1 << 50}}, "memory_bytes must be"),
    ({"profile": {**HONEST["profile"], "memory_bytes": -5}}, "memory_bytes must be"),
    ({"profile": {**HONEST["profile"], "gflops": float("inf")}}, "gflops must be"),
    ({"profile": {**HONEST["profile"], "gflops": float("nan")}}, "gflops must be"),
    ({"profile": {**HONEST["profile"], "up_bytes_per_s": 0.0}}, "up_bytes_per_s must be"),
    ({"profile": {**HONEST["profile"], "latency_s": 1e9}}, "latency_s must be"),
    ({"profile": {**HONEST["profile"], "device": "x" * 1000}}, "at most 32 characters"),
    ({"addresses": [[["10.0.0.1", 1]] * 17, None]}, "invalid message"),
    ({"addresses": {"addresses": [["10.0.0.1", 1]] * 17}}, "at most 16 addresses"),
    ({"addresses": {"addresses": [["evil.example", 1]]}}, "does not appear to be"),
    ({"addresses": {"observed": ["\x1b[2J", 1]}}, "does not appear to be"),
    ({"addresses": {"observed": ["127.0.0.1", 70000]}}, "port must be between"),
]


def test_invalid_profiles_and_addresses_are_rejected_with_a_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            identity = await server.enroll("mallory")
            async with Client(server.address, member_context(identity)) as client:
                for lie, sentence in LIES:
                    socket = await client.connect("/v1/control", max_message_bytes=MAX_MESSAGE_BYTES)
                    await socket.send_bytes(msgspec.msgpack.encode({**HONEST, "type": "Hello", **lie}))
                    disconnect = msgspec.msgpack.decode((await socket.receive()).data, type=Disconnect)
                    assert sentence in disconnect.reason
                    await server.wait_for_log("rejected mallory at 127.0.0.1", sentence)
                    await socket.close()
            assert "mallory" not in server.coordinator.state.nodes
            async with FakeNode(identity, server.address), await server.node("carl"):  # planning works as before
                await server.wait_for_log("cluster c2-0 is training")
                await server.train(20)

    run(test())


def test_a_plausible_false_profile_costs_one_cluster_and_a_quarantine(tmp_path: Path) -> None:
    async def lies(node: FakeNode, part: Assignment) -> None:
        await node.send(StageReport(part.generation, StageFailed("it needs 40 GB, 2 GB are here")))

    async def test() -> None:
        huge = NodeProfile(memory_bytes=64 * 10**9, gflops=1e5)
        async with running_coordinator(tmp_path) as server, contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(await server.node("aaa", profile=huge, behaviour=lies))
            for name in ("bob", "carl"):
                await stack.enter_async_context(await server.node(name))
            await server.wait_for_log("failed: aaa (stage 0) failed: it needs 40 GB")
            await server.wait_for_log("aaa is quarantined: it needs 40 GB")
            await server.train()
            assert server.cluster_of("bob").plan.members == ("bob", "carl")
            assert server.coordinator.state.generation == 2, "it was not tried again"

    run(test())
