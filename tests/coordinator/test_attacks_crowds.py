"""Crowds, silence and full disks: a coordinator keeps its memory, its honest nodes and its batches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ravnest.coordinator.journal import replay
from ravnest.net.addresses import Address
from ravnest.net.agree import Introduction, encode_introduction
from ravnest.net.front import FrontConfig
from ravnest.net.tunnel import relay_context
from ravnest.node.client import member_context
from tests.coordinator.attacks import FRONT, PATIENT, SHORT, Caller, House, anonymous, at_work, house, run
from tests.coordinator.guests import Guest, feed_context

pytestmark = pytest.mark.timeout(60)

DISK_SIZE = "512k"
UPGRADE = (
    b"GET /v1/control HTTP/1.1\r\nHost: coordinator\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)
BODY = b"POST /v1/enrol HTTP/1.1\r\nHost: coordinator\r\nContent-Length: 100\r\n\r\n{"


async def crumbs(caller: Caller, data: bytes) -> None:
    """A byte at a time, with pauses, for as long as somebody listens."""
    for i in range(len(data)):
        await caller.say(data[i : i + 1])
        await asyncio.sleep(0.02)


async def stalls(address: Address, context: ssl.SSLContext | None, said: bytes, *, slowly: bool = False) -> bytes:
    """Say this and no more; returns what was answered before the other side ended it, which it must."""
    async with Caller(address, context) as caller:
        talking = asyncio.create_task(crumbs(caller, said) if slowly else caller.say(said))
        heard = await caller.rest()
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        return heard


def test_half_open_connections_of_every_kind_are_ended_and_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path, patience=SHORT, front=FRONT) as found:
            at, ann = found.address, found.guests["ann"].identity
            member, feed = member_context(ann), feed_context(ann)
            member.check_hostname = False
            half = encode_introduction(Introduction.of(1, "feed"))[:9]
            weights = b"PUT /v1/weights/1/0 HTTP/1.1\r\nHost: coordinator\r\nContent-Length: 900\r\n\r\n some"
            slow: dict[str, Coroutine[Any, Any, bytes]] = {
                "handshake": stalls(at, None, b""),
                "no TLS": stalls(at, None, b"GET / HTTP/1.1\r\n\r\n"),
                "half a handshake": stalls(at, None, b"\x16\x03\x01\x02\x00\x01\x00"),
                "silence": stalls(at, anonymous(), b""),
                "no HTTP": stalls(at, anonymous(), b"\x00\x01 nonsense\r\n\r\n"),
                "headers": stalls(at, anonymous(), UPGRADE * 9, slowly=True),
                "long headers": stalls(at, anonymous(), b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000),
                "body": stalls(at, anonymous(), BODY),
                "weights": stalls(at, member, weights),
                "no hello": stalls(at, member, UPGRADE),
                "half a hello": stalls(at, member, UPGRADE + b"\x82\xfe\xff\xff"),
                "feed": stalls(at, feed, half),
                "relay": stalls(at, relay_context(ann), b""),
            }
            answers, _ = await asyncio.gather(asyncio.gather(*slow.values()), found.trains(20))
            told = dict(zip(slow, answers, strict=True))
            assert b"408" in told["body"]
            assert b"408" in told["weights"]
            assert b"400" in told["no HTTP"]
            for reason in (
                "SSL handshake is taking longer", "it said nothing for 1 s", "it does not speak HTTP as we do",
                "it sent no whole request within 1 s", "its request took too long", "nothing was heard for 1 s",
                "did not say what for within 1 s",
            ):  # fmt: skip
                await found.says("refused", reason)
            assert found.coordinator.state.clusters["c1-0"].phase == "training"
            assert not any(name.endswith(".partial") for name in os.listdir(tmp_path))

    run(test())


def rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


async def half_open(address: Address, number: int) -> socket.socket:
    """From one of a few addresses; every other one begins a handshake that it does not finish."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind((f"127.0.1.{number % 8}", 0))
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, address)
    if number % 2:
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(sock, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    return sock


def test_a_thousand_connections_that_never_finish_keep_nobody_out(tmp_path: Path) -> None:
    async def test() -> None:
        patient = FrontConfig(handshake_s=60.0, first_word_s=60.0)  # so that it is not time that ends them
        async with at_work(tmp_path, front=patient) as found:
            identities = [await found.enrol(name) for name in ("carl", "dave")]
            await found.trains()
            before_bytes = rss_bytes()
            tracemalloc.start()
            crowd = await asyncio.gather(*(half_open(found.address, number) for number in range(1000)))
            try:
                async with Guest(identities[0], found.address), Guest(identities[1], found.address):
                    await found.phase("c2-0", "training")
                    await found.trains(50)
                    assert (await found.enrol("erin")).name == "erin"
                peak_bytes, grown_bytes = tracemalloc.get_traced_memory()[1], rss_bytes() - before_bytes
            finally:
                tracemalloc.stop()
                for sock in crowd:
                    sock.close()
            # A handshake has a buffer of its own: a thousand of them would have some 270 MB.
            assert peak_bytes < 60e6, f"{peak_bytes / 1e6:.0f} MB"
            assert grown_bytes < 60e6, f"{grown_bytes / 1e6:.0f} MB"
            await found.says("refused 127.0.1.", "times", "slowest of too many that still shake hands")
            assert sum("refused" in said for said in found.words) < 200, "a crowd does not fill the log"

    run(test())


@contextlib.asynccontextmanager
async def never_reads(address: Address, context: ssl.SSLContext, request: bytes) -> AsyncIterator[Caller]:
    async with Caller(address, context) as caller:
        await caller.say(request)
        yield caller


def test_guests_who_do_not_read_cost_little_and_not_for_long(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path, patience=SHORT) as found:
            found.giver.file = bytes(16 * 10**6)
            async with await found.guest("ann") as ann, await found.guest("bob"):
                await found.trains()
                context = member_context(ann.identity)
                context.check_hostname = False
                blob = f"GET /v1/blobs/{ann.part.file.digest} HTTP/1.1\r\nHost: coordinator\r\n\r\n".encode()
                line = b"GET /v1/line?seconds=3 HTTP/1.1\r\nHost: coordinator\r\n\r\n"
                async with contextlib.AsyncExitStack() as stack:
                    tracemalloc.start()
                    stack.callback(tracemalloc.stop)
                    deaf = [
                        await stack.enter_async_context(never_reads(found.address, context, request))
                        for request in [blob] * 10 + [line] * 4
                    ]
                    await found.trains(20)
                    await found.says("refused 127.0.0.1", "its request took too long")
                    counters = found.coordinator.state.counters
                    await found.until(lambda: counters.refused == len(deaf), "all of them are cut off")
                    peak_bytes = tracemalloc.get_traced_memory()[1]
                    assert peak_bytes < 40e6, f"{peak_bytes / 1e6:.0f} MB: whole files would be 160 MB"
                    await asyncio.gather(*(caller.rest() for caller in deaf))  # which ends
                await found.trains()

    run(test())


def test_requests_by_the_thousand_are_answered_or_wait(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path, patience=replace(PATIENT, tell_s=2.0)) as found:
            many = b"GET /v1/status HTTP/1.1\r\nHost: coordinator\r\n\r\n" * 5000
            tracemalloc.start()
            try:
                async with never_reads(found.address, anonymous(), many):
                    await found.says("refused 127.0.0.1", "not known here")
                    await found.trains(50)
                assert tracemalloc.get_traced_memory()[1] < 20e6
            finally:
                tracemalloc.stop()
            assert sum("refused" in said for said in found.words) <= 2, "a crowd does not fill the log"

    run(test())


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))


async def put_weights(found: House, num_bytes: int) -> bytes:
    context = member_context(found.guests["ann"].identity)
    context.check_hostname = False
    head = f"PUT /v1/weights/1/0 HTTP/1.1\r\nHost: c\r\nConnection: close\r\nContent-Length: {num_bytes}\r\n\r\n"
    async with Caller(found.address, context) as caller:
        await caller.say(head.encode() + bytes(num_bytes))
        return await caller.rest()


def test_a_full_disk_stops_nobody_and_nothing_of_it_is_missing_afterwards(small_disk: Path) -> None:
    async def test() -> None:
        async with at_work(small_disk) as found:
            found.cluster_of("ann").max_weights_bytes[0] = 10**6
            fill(small_disk / "ballast")
            found.coordinator.note("x" * 5000)  # more than is left in the last page
            await found.says("cannot be written", "No space left on device", "training goes on")
            await found.trains(50)
            answer = await put_weights(found, 10_000)
            assert b"507" in answer
            assert b"No space left on device" in answer
            await found.says("the weights of ann cannot be written", "No space left on device")
            (small_disk / "ballast").unlink()
            await found.says("is written again, and complete")
            assert b"200 OK" in await put_weights(found, 10_000)
        state, problems = replay(small_disk / "coordinator" / "journal")
        assert not problems
        assert state == found.coordinator.state
        assert state.leases.counts.settled == 60

    run(test())
