"""The three kinds of link behind one small face, so that one suite runs on all of them."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from ravnest.net.identity import Authority, Identity, make_authority, make_key, make_request, save_identity
from ravnest.net.link import LinkConfig
from ravnest.net.memory import MemoryChannel, memory_channels, memory_pair
from ravnest.net.stream import StreamLink
from ravnest.net.tls import dial_tls, listen_tls, tls_context
from ravnest.net.unix import unix_link, unix_pair

P = ParamSpec("P")
T = TypeVar("T")

DEADLINE_S = 10.0
YEAR = timedelta(days=365)


class Note(msgspec.Struct, tag="note", frozen=True):
    number: int
    text: str = ""


class Other(msgspec.Struct, tag="other", frozen=True):
    number: int


CONFIG = LinkConfig(headers=Note, generation=7)
Pair = tuple[StreamLink, StreamLink]


def run(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run in a thread of its own; the future brings back its result or its exception."""
    with_one = ThreadPoolExecutor(1)
    future = with_one.submit(function, *args, **kwargs)
    with_one.shutdown(wait=False)
    return future


def taking(memory: dict[int, bytearray]) -> Callable[[msgspec.Struct, tuple[int, ...]], list[memoryview]]:
    """A `place` that takes whatever comes into fresh memory, and keeps it by position."""

    def place(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
        memory.clear()
        memory.update({i: bytearray(length) for i, length in enumerate(lengths)})
        return [memoryview(part) for part in memory.values()]

    return place


def receive(link: StreamLink, deadline_s: float = DEADLINE_S) -> tuple[Note, list[bytes]]:
    memory: dict[int, bytearray] = {}
    header = link.receive(taking(memory), deadline_s=deadline_s)
    assert isinstance(header, Note)
    return header, [bytes(part) for part in memory.values()]


class Raw(Protocol):
    """The far end of a link without the link: writes any bytes at all."""

    def sendall(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Kind(Protocol):
    name: str
    big_bytes: int
    in_flight_bytes: int
    """No more than this is ever under way to a peer that does not read."""

    def pair(self, config: LinkConfig = CONFIG) -> contextlib.AbstractContextManager[Pair]: ...

    def raw(self, config: LinkConfig = CONFIG) -> contextlib.AbstractContextManager[tuple[StreamLink, Raw]]: ...


class _RawMemory:
    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel

    def sendall(self, data: bytes) -> None:
        assert self._channel.try_write([memoryview(data)]) == len(data)

    def close(self) -> None:
        self._channel.shutdown()


class MemoryKind:
    name = "memory"
    big_bytes = 64 * 10**6
    in_flight_bytes = 2**20

    @contextlib.contextmanager
    def pair(self, config: LinkConfig = CONFIG) -> Iterator[Pair]:
        left, right = memory_pair(config, capacity_bytes=2**20)
        with left, right:
            yield left, right

    @contextlib.contextmanager
    def raw(self, config: LinkConfig = CONFIG) -> Iterator[tuple[StreamLink, Raw]]:
        near, far = memory_channels(2**20)
        with StreamLink(near, config, peer="raw") as link:
            yield link, _RawMemory(far)


class UnixKind:
    name = "unix"
    big_bytes = 64 * 10**6
    in_flight_bytes = 8 * 2**20

    @contextlib.contextmanager
    def pair(self, config: LinkConfig = CONFIG) -> Iterator[Pair]:
        left, right = unix_pair(config)
        with left, right:
            yield left, right

    @contextlib.contextmanager
    def raw(self, config: LinkConfig = CONFIG) -> Iterator[tuple[StreamLink, Raw]]:
        near, far = socket.socketpair()
        with unix_link(near, config, peer="raw") as link, far:
            yield link, far


class TlsKind:
    name = "tls"
    big_bytes = 16 * 10**6
    in_flight_bytes = 64 * 2**20  # what the system lets a connection hold, both ends

    def __init__(self, members: Members) -> None:
        self.members = members

    @contextlib.contextmanager
    def pair(self, config: LinkConfig = CONFIG) -> Iterator[Pair]:
        left, right = self.members["left"], self.members["right"]
        with listen_tls(("127.0.0.1", 0), right, config, allowed=lambda name: name == "left") as listener:
            accepted = run(listener.accept, deadline_s=DEADLINE_S)
            dialled = dial_tls(
                listener.address, left, config, allowed=lambda name: name == "right", deadline_s=DEADLINE_S
            )
            with dialled, accepted.result(DEADLINE_S) as link:
                yield dialled, link

    @contextlib.contextmanager
    def raw(self, config: LinkConfig = CONFIG) -> Iterator[tuple[StreamLink, Raw]]:
        """A member of the run that has gone bad: its TLS is right, what it says in it is not."""
        context = tls_context(self.members["left"], server_side=False)
        everybody = listen_tls(("127.0.0.1", 0), self.members["right"], config, allowed=lambda name: True)
        with everybody as listener:
            accepted = run(listener.accept, deadline_s=DEADLINE_S)
            plain = socket.create_connection(listener.address, timeout=DEADLINE_S)
            with say_yes(context.wrap_socket(plain)) as far, accepted.result(DEADLINE_S) as link:
                yield link, far


def say_yes(sock: ssl.SSLSocket) -> ssl.SSLSocket:
    """What each side does after the TLS handshake, in other words than the production code's."""
    sock.sendall(b"\x01")
    assert sock.recv(1) == b"\x01"
    return sock


class Members:
    """The identities of one run, made as they are asked for."""

    def __init__(self, directory: Path, *, run_name: str = "run") -> None:
        self.directory = directory
        self.authority: Authority = make_authority(run_name, now=datetime.now(UTC), valid=YEAR)
        self._known: dict[str, Identity] = {}

    def __getitem__(self, name: str) -> Identity:
        if name not in self._known:
            self._known[name] = self.make(name)
        return self._known[name]

    def make(self, name: str, *, now: datetime | None = None, valid: timedelta = YEAR) -> Identity:
        key = make_key()
        signed = self.authority.sign(make_request(key, name), name, now=now or datetime.now(UTC), valid=valid)
        return save_identity(self.directory / name, key, signed, self.authority.certificate_pem)
