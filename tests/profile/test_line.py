"""Lines are measured over real sockets; a pace of our own is the truth that the figures must find."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ravnest.core.errors import LinkError
from ravnest.profile.answer import Answerer
from ravnest.profile.line import measure_line, parse_address


@contextmanager
def answering(max_upload_bytes_per_s: float | None = None) -> Iterator[tuple[tuple[str, int], list[str]]]:
    said: list[str] = []
    answerer = Answerer(("127.0.0.1", 0), max_upload_bytes_per_s=max_upload_bytes_per_s, say=said.append)
    address = answerer.address
    thread = threading.Thread(target=answerer.serve)
    thread.start()
    try:
        yield address, said
    finally:
        answerer.close()
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_measured_rates_are_those_that_were_set() -> None:
    """Both ends are told to send slowly: each at its own pace."""
    with answering(max_upload_bytes_per_s=8e6) as (address, said):
        line = measure_line(address, seconds=0.6, max_upload_bytes_per_s=5e6)
    assert line.up_bytes_per_s == pytest.approx(5e6, rel=0.25)
    assert line.down_bytes_per_s == pytest.approx(8e6, rel=0.25)
    assert 0 < line.latency_s < 0.1
    assert said == ["127.0.0.1: echo", "127.0.0.1: give", "127.0.0.1: take"]


def test_a_fast_line_is_not_held_back() -> None:
    with answering() as (address, _):
        line = measure_line(address, seconds=0.2)
    assert min(line.up_bytes_per_s, line.down_bytes_per_s) > 2e7


GARBAGE = {
    "noise": os.urandom(64),
    "a web browser": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "an unknown kind": struct.pack("!8sBI", b"ravline1", 9, 100),
    "no time": struct.pack("!8sBI", b"ravline1", 2, 0),
    "an hour": struct.pack("!8sBI", b"ravline1", 2, 3_600_000),
}


def test_strangers_are_sent_away_and_harm_nobody() -> None:
    with answering() as (address, said):
        for name, content in GARBAGE.items():
            with socket.create_connection(address, timeout=5) as sock:
                sock.sendall(content)
                assert _rest(sock) == b"", name
        assert len([text for text in said if "not a request" in text]) == len(GARBAGE)
        with socket.create_connection(address, timeout=5):
            pass  # leaves without a word
        assert measure_line(address, seconds=0.2).down_bytes_per_s > 0


def _rest(sock: socket.socket) -> bytes:
    try:
        return sock.recv(100)
    except ConnectionResetError:
        return b""


def test_an_answerer_gives_only_for_so_long() -> None:
    with answering() as (address, _), socket.create_connection(address, timeout=5) as sock:
        sock.sendall(struct.pack("!8sBI", b"ravline1", 2, 100))
        began = time.monotonic()
        while sock.recv(2**20):
            pass
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("answer", [b"", b"not the bytes that were sent" * 9], ids=["nothing", "others"])
def test_a_peer_that_is_no_answerer(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def be_rude() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(100)
                sock.sendall(answer)

        thread = threading.Thread(target=be_rude)
        thread.start()
        with pytest.raises(LinkError, match=r"closed the connection|did not send back|broke"):
            measure_line(server.getsockname()[:2], seconds=0.2)
        thread.join()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    with pytest.raises(LinkError, match=r"cannot reach 127.0.0.1:\d+.*ravnest profile --serve"):
        measure_line(address)


def test_a_port_that_is_taken() -> None:
    with answering() as (address, _), pytest.raises(LinkError, match="cannot listen"):
        Answerer(address)


def test_addresses() -> None:
    assert parse_address("attic:7710") == ("attic", 7710)
    assert parse_address("[::1]:7710") == ("::1", 7710)
    assert parse_address(":7710", default_host="0.0.0.0") == ("0.0.0.0", 7710)
    for wrong in ("attic", "attic:", "attic:door", ":7710", "attic:70000"):
        with pytest.raises(ValueError, match=r"HOST:PORT|65535"):
            parse_address(wrong)
