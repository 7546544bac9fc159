"""The listener of this host: it accepts connections at a bounded rate, and only while few are open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from ravnest.dashboard import listener
from tests.unit.coordinator.attacks import run
from tests.unit.dashboard.served import Served, served


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.origin.rpartition(":")[2])), timeout=30)


async def ask(server: Served, connection: socket.socket, *, within_s: float = 30.0) -> bytes:
    """Send a request; return the first bytes of the answer."""
    host = server.origin.partition("//")[2]
    connection.settimeout(within_s)
    connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return await asyncio.to_thread(connection.recv, 12)


def test_connections_beyond_the_rate_wait_in_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_ACCEPTED_PER_S", 1e-6)
    monkeypatch.setattr(listener, "_BURST", 3.0)

    async def test() -> None:
        async with served(tmp_path) as server:
            with contextlib.ExitStack() as stack:
                connections = [stack.enter_context(connect(server)) for _ in range(5)]
                for connection in connections[:3]:
                    assert await ask(server, connection) == b"HTTP/1.1 200"
                for connection in connections[3:]:
                    with pytest.raises(TimeoutError):
                        await ask(server, connection, within_s=0.2)
                assert await ask(server, connections[0]) != b"", "an open connection is served further"

    run(test())


def test_few_connections_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_MAX_CONNECTIONS", 2)

    async def test() -> None:
        async with served(tmp_path) as server:
            with connect(server) as one, connect(server) as two, connect(server) as three:
                assert await ask(server, one) == await ask(server, two) == b"HTTP/1.1 200"
                with pytest.raises(TimeoutError):
                    await ask(server, three, within_s=0.2)
                one.close()
                assert await ask(server, three) == b"HTTP/1.1 200"

    run(test())


def test_a_connection_without_a_request_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_REQUEST_S", 0.1)

    async def test() -> None:
        async with served(tmp_path) as server:
            with connect(server) as idle, contextlib.suppress(ConnectionError):
                assert await asyncio.to_thread(idle.recv, 1) == b""

    run(test())
