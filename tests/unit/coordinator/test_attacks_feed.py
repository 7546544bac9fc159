"""Malicious members on the feed and with files: they fail their own cluster and no other."""

from __future__ import annotations

import asyncio
import gzip
import os
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from ravnest.errors import LinkError, RequestRejected
from ravnest.node.client import Client, member_context, unverified_context
from ravnest.protocol.control import Assignment
from ravnest.protocol.pipeline import Backward, Forward
from ravnest.transport.frame import encode_head
from tests.unit.coordinator.attacks import coordinator_with_nodes, run, running_coordinator
from tests.unit.coordinator.clients import FakeNode, Feed, feed_context, honest

CLOSED = (OSError, EOFError, LinkError)

Cheat = Callable[[Feed], None]


def frame(*lengths: int, header: msgspec.Struct | None = None) -> bytes:
    return encode_head(header or Backward(0, 1), lengths, generation=1, max_bytes=2**80)


CHEATS: dict[str, tuple[Cheat, str]] = {
    "twice": (lambda feed: feed.write(2 * frame()), "microbatch 0 was acknowledged"),
    "out of order": (lambda feed: feed.acknowledge(1), "microbatch 1 was acknowledged"),
    "never sent": (lambda feed: feed.acknowledge(99), "microbatch 99 was acknowledged"),
    "another generation": (lambda feed: feed.acknowledge(0, generation=7), "frame of generation 7"),
    "huge": (lambda feed: feed.write(frame(2**62)), "is over the limit of 0 B"),
    "many buffers": (lambda feed: feed.write(frame(*[0] * 4096)[:16] + b"\xff" * 40_000), "is over the limit"),
    "another message": (
        lambda feed: feed.write(frame(header=Forward(0, 1))),
        "the first stage sent a Forward",
    ),
    "garbage": (lambda feed: feed.write(b"GET / HTTP/1.1\r\n\r\n"), "do not begin a frame"),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_first_stage_that_cheats_fails_its_cluster_and_others_get_its_batches(tmp_path: Path, cheat: str) -> None:
    behaviour, sentence = CHEATS[cheat]

    async def cheats(node: FakeNode, part: Assignment) -> None:
        node.feed = await node.dial_feed(part)
        await node.report_ready(part)
        await node.feed.next()
        await node.feed.next()
        behaviour(node.feed)
        await node.feed.ended()

    async def test() -> None:
        async with (
            running_coordinator(tmp_path) as server,
            await server.node("ann", behaviour=cheats),
            await server.node("bob"),
        ):
            await server.phase("c1-0", "training")
            async with await server.node("carl"), await server.node("dave"):
                await server.phase("c2-0", "training")
                await server.train(10)
                await server.wait_for_log("cluster c1-0 failed: the feed to ann failed", sentence)
                await server.wait_for_log("ann is quarantined", sentence)
                leases = server.coordinator.state.leases
                assert leases.counts_of("c1-0").returned > 0
                assert leases.counts_of("c2-0").settled >= leases.counts_of("c1-0").returned
                await server.train()

    run(test())


def test_a_feed_for_another_generation_or_cluster_is_rejected(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            ann, bob = server.nodes_by_name["ann"], server.nodes_by_name["bob"]
            part = ann.assignment
            for generation in (part.generation - 1, part.generation + 1):
                with pytest.raises(CLOSED):
                    await Feed.dial(server.address, feed_context(ann.identity), generation, part.cluster)
            with pytest.raises(CLOSED):
                await Feed.dial(server.address, feed_context(ann.identity), part.generation, "another")
            await server.wait_for_log("rejected ann at 127.0.0.1", "for another cluster or generation than 1")
            with pytest.raises(CLOSED):
                await bob.dial_feed(part)
            await server.wait_for_log("rejected bob at 127.0.0.1", "bob is not the first stage of a cluster")

    run(test())


def test_the_newer_of_two_feeds_counts_before_the_first_microbatch(tmp_path: Path) -> None:
    async def dials_twice(node: FakeNode, part: Assignment) -> None:
        older = await node.dial_feed(part)
        await honest(node, part)
        older.close()

    async def test() -> None:
        async with (
            running_coordinator(tmp_path) as server,
            await server.node("ann", behaviour=dials_twice),
            await server.node("bob"),
        ):
            await server.train()
            assert server.coordinator.state.generation == 1

    run(test())


# Files and bodies.


def partial_files(directory: Path) -> int:
    return sum(name.endswith(".partial") for name in os.listdir(directory))


async def stream(num_bytes: int) -> AsyncIterator[bytes]:
    """Without a content length."""
    for _ in range(0, num_bytes, 100):
        yield bytes(100)
        await asyncio.sleep(0)


def test_weights_that_are_too_large_or_of_another_stage_are_rejected(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            ann, generation = server.nodes_by_name["ann"], server.nodes_by_name["ann"].assignment.generation
            path = server.requester.weights_path("c1-0", 0)
            async with Client(server.address, member_context(ann.identity)) as client:
                with pytest.raises(RequestRejected, match="the body has 1001 bytes, the limit of this stage is 1000"):
                    await client.ask("PUT", f"/v1/weights/{generation}/0", data=bytes(1001))
                with pytest.raises(RequestRejected, match="larger than 1000 bytes"):
                    await client.ask("PUT", f"/v1/weights/{generation}/0", data=stream(2000))
                for where in (f"{generation}/1", f"{generation + 1}/0", f"{generation - 1}/0"):
                    with pytest.raises(RequestRejected, match="is not stage"):
                        await client.ask("PUT", f"/v1/weights/{where}", data=bytes(10))
                assert not path.exists()

                async def slowly() -> AsyncIterator[bytes]:
                    yield b"a" * 500
                    await server.until(lambda: partial_files(tmp_path) == 1, "the first half is there")
                    await client.ask("PUT", f"/v1/weights/{generation}/0", data=b"b" * 1000)
                    assert path.read_bytes() == b"b" * 1000
                    yield b"a" * 500

                await client.ask("PUT", f"/v1/weights/{generation}/0", data=slowly())
            assert path.read_bytes() == b"a" * 1000, "the last complete upload counts"
            assert partial_files(tmp_path) == 0
            await server.wait_for_log("rejected 127.0.0.1", "larger than 1000 bytes")

    run(test())


def test_weights_of_a_cluster_that_ended_meanwhile_are_dropped(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path, ("ann", "bob", "carl")) as server:
            ann = server.nodes_by_name["ann"]

            async def half_then_half() -> AsyncIterator[bytes]:
                yield bytes(10)
                await server.until(lambda: partial_files(tmp_path) == 1, "the first half is there")
                server.coordinator.kick("ann", "it was slow")
                yield bytes(10)

            async with Client(server.address, member_context(ann.identity)) as client:
                with pytest.raises(RequestRejected, match="cluster c1-0 has ended"):
                    await client.ask("PUT", "/v1/weights/1/0", data=half_then_half())
            assert partial_files(tmp_path) == 0
            assert "c1-0-0" not in os.listdir(tmp_path)

    run(test())


def test_a_body_that_is_too_large_is_rejected(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server, Client(server.address, unverified_context()) as client:
            with pytest.raises(RequestRejected, match="larger than 65536 bytes") as rejection:
                await client.ask("POST", "/v1/enrol", data=bytes(65 * 1024))
            assert rejection.value.status == 413
            await server.wait_for_log("rejected 127.0.0.1", "the request is larger than 65536 bytes")
            bomb = gzip.compress(bytes(60 * 10**6))
            tracemalloc.start()
            try:
                with pytest.raises(RequestRejected, match="JSON is malformed"):  # it is not decompressed
                    await client.ask("POST", "/v1/enrol", data=bomb, headers={"Content-Encoding": "gzip"})
                assert tracemalloc.get_traced_memory()[1] < 10e6
            finally:
                tracemalloc.stop()
            for body in (b"{", b"[1]", b'{"token": 5}', b"\xff\xfe"):
                with pytest.raises(RequestRejected):
                    await client.ask("POST", "/v1/enrol", data=body)
            with pytest.raises(RequestRejected, match="no such resource"):
                await client.ask("GET", "/etc/passwd")

    run(test())
