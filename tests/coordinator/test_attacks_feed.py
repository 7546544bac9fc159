"""Members gone bad, on the feed and with files: what breaks the rules ends their own cluster and nobody else's."""

from __future__ import annotations

import asyncio
import gzip
import os
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from ravnest.core.control import Part
from ravnest.core.errors import LinkError
from ravnest.core.messages import Backward, Forward
from ravnest.net.frame import encode_head
from ravnest.node.client import Client, Refused, blind_context, member_context
from tests.coordinator.attacks import at_work, house, run
from tests.coordinator.guests import Feed, Guest, feed_context, honest

pytestmark = pytest.mark.timeout(60)

CLOSED = (OSError, EOFError, LinkError)

Cheat = Callable[[Feed], None]


def frame(*lengths: int, header: msgspec.Struct | None = None) -> bytes:
    return encode_head(header or Backward(0, 1), lengths, generation=1, max_bytes=2**80)


CHEATS: dict[str, tuple[Cheat, str]] = {
    "twice": (lambda feed: feed.write(2 * frame()), "microbatch 0 was acknowledged"),
    "out of order": (lambda feed: feed.acknowledge(1), "microbatch 1 was acknowledged"),
    "never sent": (lambda feed: feed.acknowledge(99), "microbatch 99 was acknowledged"),
    "another generation": (lambda feed: feed.acknowledge(0, generation=7), "the frame is of generation 7"),
    "huge": (lambda feed: feed.write(frame(2**62)), "is over the limit of 0 B"),
    "many buffers": (lambda feed: feed.write(frame(*[0] * 4096)[:16] + b"\xff" * 40_000), "is over the limit"),
    "another message": (lambda feed: feed.write(frame(header=Forward(0, 1))), "a Forward does not come from a root"),
    "garbage": (lambda feed: feed.write(b"GET / HTTP/1.1\r\n\r\n"), "do not begin a frame"),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_root_that_cheats_ends_its_cluster_and_others_get_its_batches(tmp_path: Path, cheat: str) -> None:
    does, sentence = CHEATS[cheat]

    async def cheats(guest: Guest, part: Part) -> None:
        guest.feed = await guest.dial_feed(part)
        await guest.report_ready(part)
        await guest.feed.next()
        await guest.feed.next()
        does(guest.feed)
        await guest.feed.ended()

    async def test() -> None:
        async with house(tmp_path) as found, await found.guest("ann", does=cheats), await found.guest("bob"):
            await found.phase("c1-0", "training")
            async with await found.guest("carl"), await found.guest("dave"):
                await found.phase("c2-0", "training")
                await found.trains(10)
                await found.says("cluster c1-0 is lost: the feed to ann broke", sentence)
                await found.says("ann is left out of plans for a while", sentence)
                leases = found.coordinator.state.leases
                assert leases.of("c1-0").returned > 0
                assert leases.of("c2-0").settled >= leases.of("c1-0").returned
                await found.trains()

    run(test())


def test_a_feed_for_another_generation_or_cluster_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            ann, bob = found.guests["ann"], found.guests["bob"]
            part = ann.part
            for generation in (part.generation - 1, part.generation + 1):
                with pytest.raises(CLOSED):
                    await Feed.dial(found.address, feed_context(ann.identity), generation, part.cluster)
            with pytest.raises(CLOSED):
                await Feed.dial(found.address, feed_context(ann.identity), part.generation, "another")
            await found.says("refused ann at 127.0.0.1", "another cluster or generation than its own, which is 1")
            with pytest.raises(CLOSED):
                await bob.dial_feed(part)
            await found.says("refused bob at 127.0.0.1", "bob is no root of a cluster")

    run(test())


def test_a_root_that_dials_again_before_it_is_fed_has_the_newer_line(tmp_path: Path) -> None:
    async def dials_twice(guest: Guest, part: Part) -> None:
        older = await guest.dial_feed(part)
        await honest(guest, part)
        older.close()

    async def test() -> None:
        async with house(tmp_path) as found, await found.guest("ann", does=dials_twice), await found.guest("bob"):
            await found.trains()
            assert found.coordinator.state.generation == 1

    run(test())


# Files and bodies.


def partial_files(directory: Path) -> int:
    return sum(name.endswith(".partial") for name in os.listdir(directory))


async def stream(num_bytes: int) -> AsyncIterator[bytes]:
    """Without saying how long it will be."""
    for _ in range(0, num_bytes, 100):
        yield bytes(100)
        await asyncio.sleep(0)


def test_weights_that_are_too_many_or_not_its_own_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            ann, generation = found.guests["ann"], found.guests["ann"].part.generation
            path = found.giver.weights_path("c1-0", 0)
            async with Client(found.address, member_context(ann.identity)) as client:
                with pytest.raises(Refused, match="weights of 1001 bytes, at most 1000"):
                    await client.ask("PUT", f"/v1/weights/{generation}/0", data=bytes(1001))
                with pytest.raises(Refused, match="more than the 1000 bytes"):
                    await client.ask("PUT", f"/v1/weights/{generation}/0", data=stream(2000))
                for where in (f"{generation}/1", f"{generation + 1}/0", f"{generation - 1}/0"):
                    with pytest.raises(Refused, match="is not stage"):
                        await client.ask("PUT", f"/v1/weights/{where}", data=bytes(10))
                assert not path.exists()

                async def slowly() -> AsyncIterator[bytes]:
                    yield b"a" * 500
                    await found.until(lambda: partial_files(tmp_path) == 1, "the first half is there")
                    await client.ask("PUT", f"/v1/weights/{generation}/0", data=b"b" * 1000)
                    assert path.read_bytes() == b"b" * 1000
                    yield b"a" * 500

                await client.ask("PUT", f"/v1/weights/{generation}/0", data=slowly())
            assert path.read_bytes() == b"a" * 1000, "the last to be whole counts"
            assert partial_files(tmp_path) == 0
            await found.says("refused 127.0.0.1", "more than the 1000 bytes that belong to this stage")

    run(test())


def test_weights_of_a_cluster_that_ended_meanwhile_are_not_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path, ("ann", "bob", "carl")) as found:
            ann = found.guests["ann"]

            async def half_then_half() -> AsyncIterator[bytes]:
                yield bytes(10)
                await found.until(lambda: partial_files(tmp_path) == 1, "the first half is there")
                found.coordinator.kick("ann", "it was slow")
                yield bytes(10)

            async with Client(found.address, member_context(ann.identity)) as client:
                with pytest.raises(Refused, match="cluster c1-0 is no more"):
                    await client.ask("PUT", "/v1/weights/1/0", data=half_then_half())
            assert partial_files(tmp_path) == 0
            assert "c1-0-0" not in os.listdir(tmp_path)

    run(test())


def test_a_body_that_is_too_long_or_becomes_so_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found, Client(found.address, blind_context()) as client:
            with pytest.raises(Refused, match="over 65536 bytes") as refusal:
                await client.ask("POST", "/v1/enrol", data=bytes(65 * 1024))
            assert refusal.value.status == 413
            await found.says("refused 127.0.0.1", "its request is over 65536 bytes")
            bomb = gzip.compress(bytes(60 * 10**6))
            tracemalloc.start()
            try:
                with pytest.raises(Refused, match="JSON is malformed"):  # it is not unpacked at all
                    await client.ask("POST", "/v1/enrol", data=bomb, headers={"Content-Encoding": "gzip"})
                assert tracemalloc.get_traced_memory()[1] < 10e6
            finally:
                tracemalloc.stop()
            for body in (b"{", b"[1]", b'{"token": 5}', b"\xff\xfe"):
                with pytest.raises(Refused):
                    await client.ask("POST", "/v1/enrol", data=body)
            with pytest.raises(Refused, match="not here"):
                await client.ask("GET", "/etc/passwd")

    run(test())
