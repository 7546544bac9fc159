"""Many connections, silent connections and full disks: a coordinator keeps its memory, nodes and batches."""

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

from ravnest.coordinator.http.alpn_server import AlpnServerConfig
from ravnest.coordinator.journal import replay
from ravnest.node.client import member_context
from ravnest.transport.address import Address
from ravnest.transport.introduction import Introduction, encode_introduction
from ravnest.transport.p2p.relay_client import relay_context
from tests.unit.coordinator.attacks import (
    SHORT_ALPN,
    SHORT_TIMEOUTS,
    TIMEOUTS,
    RawConnection,
    RunningCoordinator,
    anonymous_context,
    coordinator_with_nodes,
    run,
    running_coordinator,
)
from tests.unit.coordinator.clients import FakeNode, feed_context

pytestmark = pytest.mark.timeout(60)

DISK_SIZE = "512k"
UPGRADE = (
    b"GET /v1/control HTTP/1.1\r\nHost: coordinator\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)
BODY = b"POST /v1/enrol HTTP/1.1\r\nHost: coordinator\r\nContent-Length: 100\r\n\r\n{"


async def drip(connection: RawConnection, data: bytes) -> None:
    """Send a byte at a time, with pauses."""
    for i in range(len(data)):
        await connection.send(data[i : i + 1])
        await asyncio.sleep(0.02)


async def stalls(address: Address, context: ssl.SSLContext | None, data: bytes, *, slowly: bool = False) -> bytes:
    """Send this and no more; returns the answer before the peer closes the connection, which it must."""
    async with RawConnection(address, context) as connection:
        sending = asyncio.create_task(drip(connection, data) if slowly else connection.send(data))
        received = await connection.rest()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return received


def test_half_open_connections_of_every_kind_are_closed_and_logged(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path, timeouts=SHORT_TIMEOUTS, alpn=SHORT_ALPN) as server:
            at, ann = server.address, server.nodes_by_name["ann"].identity
            member, feed = member_context(ann), feed_context(ann)
            member.check_hostname = False
            half = encode_introduction(Introduction.of(1, "feed"))[:9]
            weights = b"PUT /v1/weights/1/0 HTTP/1.1\r\nHost: coordinator\r\nContent-Length: 900\r\n\r\n some"
            slow: dict[str, Coroutine[Any, Any, bytes]] = {
                "handshake": stalls(at, None, b""),
                "no TLS": stalls(at, None, b"GET / HTTP/1.1\r\n\r\n"),
                "half a handshake": stalls(at, None, b"\x16\x03\x01\x02\x00\x01\x00"),
                "silence": stalls(at, anonymous_context(), b""),
                "no HTTP": stalls(at, anonymous_context(), b"\x00\x01 nonsense\r\n\r\n"),
                "headers": stalls(at, anonymous_context(), UPGRADE * 9, slowly=True),
                "long headers": stalls(at, anonymous_context(), b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000),
                "body": stalls(at, anonymous_context(), BODY),
                "weights": stalls(at, member, weights),
                "no hello": stalls(at, member, UPGRADE),
                "half a hello": stalls(at, member, UPGRADE + b"\x82\xfe\xff\xff"),
                "feed": stalls(at, feed, half),
                "relay": stalls(at, relay_context(ann), b""),
            }
            answers, _ = await asyncio.gather(asyncio.gather(*slow.values()), server.train(20))
            message = dict(zip(slow, answers, strict=True))
            assert b"408" in message["body"]
            assert b"408" in message["weights"]
            assert b"400" in message["no HTTP"]
            for reason in (
                "SSL handshake is taking longer", "no data within 1 s", "malformed HTTP request",
                "no complete request within 1 s", "the request timed out", "no message for 1 s",
                "no introduction within 1 s",
            ):  # fmt: skip
                await server.wait_for_log("rejected", reason)
            assert server.coordinator.state.clusters["c1-0"].phase == "training"
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


def test_a_thousand_unfinished_handshakes_do_not_block_nodes(tmp_path: Path) -> None:
    async def test() -> None:
        slow = AlpnServerConfig(handshake_s=60.0, first_byte_s=60.0)  # so that no timeout ends them
        async with coordinator_with_nodes(tmp_path, alpn=slow) as server:
            identities = [await server.enroll(name) for name in ("carl", "dave")]
            await server.train()
            before_bytes = rss_bytes()
            tracemalloc.start()
            sockets = await asyncio.gather(*(half_open(server.address, number) for number in range(1000)))
            try:
                async with FakeNode(identities[0], server.address), FakeNode(identities[1], server.address):
                    await server.phase("c2-0", "training")
                    await server.train(50)
                    assert (await server.enroll("erin")).name == "erin"
                peak_bytes, grown_bytes = tracemalloc.get_traced_memory()[1], rss_bytes() - before_bytes
            finally:
                tracemalloc.stop()
                for sock in sockets:
                    sock.close()
            # A handshake has a buffer of its own: a thousand of them would have some 270 MB.
            assert peak_bytes < 60e6, f"{peak_bytes / 1e6:.0f} MB"
            assert grown_bytes < 60e6, f"{grown_bytes / 1e6:.0f} MB"
            await server.wait_for_log("rejected 127.0.1.", "times", "its handshake was the oldest of more than 128")
            assert sum("rejected" in text for text in server.log) < 200, "the log is not flooded"

    run(test())


@contextlib.asynccontextmanager
async def never_reads(address: Address, context: ssl.SSLContext, request: bytes) -> AsyncIterator[RawConnection]:
    async with RawConnection(address, context) as connection:
        await connection.send(request)
        yield connection


def test_clients_that_do_not_read_cost_little_and_are_closed(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_coordinator(tmp_path, timeouts=SHORT_TIMEOUTS) as server:
            server.requester.file = bytes(16 * 10**6)
            async with await server.node("ann") as ann, await server.node("bob"):
                await server.train()
                context = member_context(ann.identity)
                context.check_hostname = False
                blob = f"GET /v1/blobs/{ann.assignment.file.digest} HTTP/1.1\r\nHost: coordinator\r\n\r\n".encode()
                line = b"GET /v1/line?seconds=3 HTTP/1.1\r\nHost: coordinator\r\n\r\n"
                async with contextlib.AsyncExitStack() as stack:
                    tracemalloc.start()
                    stack.callback(tracemalloc.stop)
                    unread = [
                        await stack.enter_async_context(never_reads(server.address, context, request))
                        for request in [blob] * 10 + [line] * 4
                    ]
                    await server.train(20)
                    await server.wait_for_log("rejected 127.0.0.1", "the request timed out")
                    counters = server.coordinator.state.counters
                    await server.until(lambda: counters.rejected == len(unread), "all of them are cut off")
                    peak_bytes = tracemalloc.get_traced_memory()[1]
                    assert peak_bytes < 40e6, f"{peak_bytes / 1e6:.0f} MB: whole files would be 160 MB"
                    await asyncio.gather(*(connection.rest() for connection in unread))  # which ends
                await server.train()

    run(test())


def test_thousands_of_requests_are_answered_or_wait(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path, timeouts=replace(TIMEOUTS, rejection_log_s=2.0)) as server:
            many = b"GET /v1/status HTTP/1.1\r\nHost: coordinator\r\n\r\n" * 5000
            tracemalloc.start()
            try:
                async with never_reads(server.address, anonymous_context(), many):
                    await server.wait_for_log("rejected 127.0.0.1", "a ticket is needed")
                    await server.train(50)
                assert tracemalloc.get_traced_memory()[1] < 20e6
            finally:
                tracemalloc.stop()
            assert sum("rejected" in text for text in server.log) <= 2, "the log is not flooded"

    run(test())


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))


async def put_weights(server: RunningCoordinator, num_bytes: int) -> bytes:
    context = member_context(server.nodes_by_name["ann"].identity)
    context.check_hostname = False
    head = f"PUT /v1/weights/1/0 HTTP/1.1\r\nHost: c\r\nConnection: close\r\nContent-Length: {num_bytes}\r\n\r\n"
    async with RawConnection(server.address, context) as connection:
        await connection.send(head.encode() + bytes(num_bytes))
        return await connection.rest()


def test_training_continues_on_a_full_disk_and_the_journal_is_complete_afterwards(small_disk: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(small_disk) as server:
            server.cluster_of("ann").max_weights_bytes[0] = 10**6
            fill(small_disk / "ballast")
            server.coordinator.note("x" * 5000)  # more than is left in the last page
            await server.wait_for_log("cannot write the journal", "No space left on device", "training continues")
            await server.train(50)
            answer = await put_weights(server, 10_000)
            assert b"507" in answer
            assert b"No space left on device" in answer
            await server.wait_for_log("cannot write the weights of ann", "No space left on device")
            (small_disk / "ballast").unlink()
            await server.wait_for_log("is written again and complete")
            assert b"200 OK" in await put_weights(server, 10_000)
        state, problems = replay(small_disk / "coordinator" / "journal")
        assert not problems
        assert state == server.coordinator.state
        assert state.leases.counts.settled == 60

    run(test())
