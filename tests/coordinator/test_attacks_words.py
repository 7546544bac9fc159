"""Members gone bad: what they say is old, twice, too long, nonsense or a lie. Others train on, and the log says why."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ravnest.core.control import MAX_MESSAGE_BYTES, Beat, Desired, Goodbye, Hello, Moved, NodeProfile, Part, Report
from ravnest.core.control import Whereabouts as Where
from ravnest.core.errors import LinkError
from ravnest.core.orders import Evaluated, Failed, Linked, Lost
from ravnest.node.client import Client, member_context
from tests.coordinator.attacks import House, at_work, house, run
from tests.coordinator.guests import PROFILE, Guest

pytestmark = pytest.mark.timeout(60)

CLOSED = (OSError, EOFError, LinkError)
HELLO = Hello(release="test", profile=PROFILE, where=Where())


async def all_heard(found: House, guest: Guest) -> None:
    """Messages are heard in order, so when the last is, all are."""
    await guest.say(Beat("all is said"))
    hearing = found.coordinator.state.hearing.of
    await found.until(lambda: hearing[guest.name].doing == "all is said", "all is heard")


# What is old, or said twice, on the conversation.


def test_reports_of_another_generation_are_dropped(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            ann, now = found.guests["ann"], found.guests["ann"].part.generation
            for generation in (now - 1, now + 1, 2**63):
                await ann.say(Report(generation, Failed("a failure of another time")))
                await ann.say(Report(generation, Lost({0: (1.0,)})))
            await all_heard(found, ann)
            assert not any("another time" in said for said in found.words)
            assert not found.giver.reports
            assert found.coordinator.state.nodes["ann"].blamed_s is None

    run(test())


def test_what_is_said_again_is_told_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            bob, part = found.guests["bob"], found.guests["bob"].part
            for _ in range(100):
                await bob.report_ready(part)
                await bob.say(Report(part.generation, Linked("ann", "direct", "it was dialled")))
                await bob.say(Moved(Where((("10.0.0.1", 5),))))
            await all_heard(found, bob)
            assert sum("bob is ready" in said for said in found.words) == 1
            assert sum("bob has a direct link" in said for said in found.words) == 1

    run(test())


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (HELLO, "said hello twice"),
        (Report(1, Lost({0: (1.0,)})), "comes from the last stage only"),
        (Report(1, Linked("mallory", "direct", "")), "it has a link to somebody who"),
        (Moved(Where((("not an address", 1),))), "does not appear to be an IPv4 or IPv6 address"),
        (Moved(Where((), ("127.0.0.1", 0))), "is not a port"),
    ],
)
def test_what_a_node_cannot_say_ends_its_conversation_and_not_its_training(
    tmp_path: Path, said: Any, sentence: str
) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            ann = found.guests["ann"]
            await ann.say(said)
            goodbye = await ann.hears(Goodbye)
            assert goodbye.again
            assert sentence in goodbye.reason
            await found.says("the connection to ann ended", sentence)
            again = Guest(ann.identity, found.address)
            again.holding = ann.holding
            async with again:
                await again.hears(Desired, lambda told: told.part is not None)
                await found.trains()
                assert again.part.generation == 1, "the cluster is the one it was"

    run(test())


def test_results_of_evaluations_that_never_were_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            bob = found.guests["bob"]
            await bob.say(Report(1, Evaluated(0, 1, (0.0,))))
            assert "was not sent" in (await bob.hears(Goodbye)).reason
            assert not found.giver.reports
            bob.told.clear()

    run(test())


# What cannot be read.


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (msgspec.msgpack.encode(msgspec.structs.replace(HELLO, release="x" * MAX_MESSAGE_BYTES)), "cannot be read"),
        (b"\xc1garbage", "cannot be read"),
        (b"\x91" * 100_000, "cannot be read"),
        (msgspec.msgpack.encode({"type": "Goodbye", "reason": ""}), "cannot be read"),
        (msgspec.msgpack.encode(Beat("first")), "did not say hello first"),
    ],
    ids=["oversize", "garbage", "nested", "the other side's", "no hello"],
)
def test_first_words_that_cannot_be_read_are_refused(tmp_path: Path, message: bytes, sentence: str) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            async with Client(found.address, member_context(await found.enrol("mallory"))) as client:
                socket = await client.connect("/v1/control", max_message_bytes=MAX_MESSAGE_BYTES)
                await socket.send_bytes(message)
                async for _ in socket:
                    pass
                assert socket.closed
            await found.says("refused mallory at 127.0.0.1", sentence)
            assert "mallory" not in found.coordinator.state.nodes

    run(test())


# Lies about oneself.

HONEST = msgspec.to_builtins(HELLO)
LIES: list[tuple[dict[str, Any], str]] = [
    ({"profile": {**HONEST["profile"], "memory_bytes": 1 << 50}}, "bytes of memory is none"),
    ({"profile": {**HONEST["profile"], "memory_bytes": -5}}, "bytes of memory is none"),
    ({"profile": {**HONEST["profile"], "gflops": float("inf")}}, "GFLOP/s is none"),
    ({"profile": {**HONEST["profile"], "gflops": float("nan")}}, "GFLOP/s is none"),
    ({"profile": {**HONEST["profile"], "up_bytes_per_s": 0.0}}, "bytes/s up is none"),
    ({"profile": {**HONEST["profile"], "latency_s": 1e9}}, "a latency of"),
    ({"profile": {**HONEST["profile"], "device": "x" * 1000}}, "at most 32 letters"),
    ({"where": [[["10.0.0.1", 1]] * 17, None]}, "cannot be read"),
    ({"where": {"addresses": [["10.0.0.1", 1]] * 17}}, "at most 16 addresses"),
    ({"where": {"addresses": [["evil.example", 1]]}}, "does not appear to be"),
    ({"where": {"observed": ["\x1b[2J", 1]}}, "does not appear to be"),
    ({"where": {"observed": ["127.0.0.1", 70000]}}, "is not a port"),
]


def test_absurd_sizes_and_addresses_are_refused_with_a_sentence(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            identity = await found.enrol("mallory")
            async with Client(found.address, member_context(identity)) as client:
                for lie, sentence in LIES:
                    socket = await client.connect("/v1/control", max_message_bytes=MAX_MESSAGE_BYTES)
                    await socket.send_bytes(msgspec.msgpack.encode({**HONEST, "type": "Hello", **lie}))
                    goodbye = msgspec.msgpack.decode((await socket.receive()).data, type=Goodbye)
                    assert sentence in goodbye.reason
                    await found.says("refused mallory at 127.0.0.1", sentence)
                    await socket.close()
            assert "mallory" not in found.coordinator.state.nodes
            async with Guest(identity, found.address), await found.guest("carl"):  # plans are made as before
                await found.says("cluster c2-0 trains")
                await found.trains(20)

    run(test())


def test_a_plausible_lie_costs_one_cluster_and_the_liar_is_left_out(tmp_path: Path) -> None:
    async def lies(guest: Guest, part: Part) -> None:
        await guest.say(Report(part.generation, Failed("it needs 40 GB, 2 GB are here")))

    async def test() -> None:
        huge = NodeProfile(memory_bytes=64 * 10**9, gflops=1e5)
        async with house(tmp_path) as found, contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(await found.guest("aaa", profile=huge, does=lies))
            for name in ("bob", "carl"):
                await stack.enter_async_context(await found.guest(name))
            await found.says("is lost: aaa (stage 0) failed: it needs 40 GB")
            await found.says("aaa is left out of plans for a while: it needs 40 GB")
            await found.trains()
            assert found.cluster_of("bob").plan.members == ("bob", "carl")
            assert found.coordinator.state.generation == 2, "it was not tried again"

    run(test())
