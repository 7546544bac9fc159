"""The three kinds of link behind one interface, so that one conformance suite runs on all of them."""

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

from ravnest.transport.identity import Authority, Identity, make_authority, make_key, make_request, save_identity
from ravnest.transport.link import LinkConfig
from ravnest.transport.local import unix_link, unix_pair
from ravnest.transport.stream import StreamLink
from ravnest.transport.tls import tls_context
from tests.unit.transport.memory import MemoryChannel, memory_channels, memory_pair
from tests.unit.transport.tls_links import TlsListener, dial_tls

P = ParamSpec("P")
T = TypeVar("T")

DEADLINE_S = 30.0
YEAR = timedelta(days=365)


class Note(msgspec.Struct, tag="note", frozen=True):
    number: int
    text: str = ""


class Other(msgspec.Struct, tag="other", frozen=True):
    number: int


CONFIG = LinkConfig(headers=Note, generation=7)
Pair = tuple[StreamLink, StreamLink]


def run(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run in a thread of its own; the future has its result or its exception."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args, **kwargs)
    pool.shutdown(wait=False)
    return future


def allocate_into(memory: dict[int, bytearray]) -> Callable[[msgspec.Struct, tuple[int, ...]], list[memoryview]]:
    """Make a `place` that receives every buffer into new memory, stored in `memory` by position."""

    def place(header: msgspec.Struct, lengths: tuple[int, ...]) -> list[memoryview]:
        memory.clear()
        memory.update({i: bytearray(length) for i, length in enumerate(lengths)})
        return [memoryview(part) for part in memory.values()]

    return place


def receive(link: StreamLink, deadline_s: float = DEADLINE_S) -> tuple[Note, list[bytes]]:
    memory: dict[int, bytearray] = {}
    header = link.receive(allocate_into(memory), deadline_s=deadline_s)
    assert isinstance(header, Note)
    return header, [bytes(part) for part in memory.values()]


class Raw(Protocol):
    """The far end of a connection without a link: sends arbitrary bytes."""

    def sendall(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Kind(Protocol):
    name: str
    big_bytes: int
    in_flight_bytes: int
    """Upper bound of the bytes in flight to a peer that does not read."""

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
    in_flight_bytes = 64 * 2**20  # socket buffers of both ends

    def __init__(self, members: Members) -> None:
        self.members = members

    @contextlib.contextmanager
    def pair(self, config: LinkConfig = CONFIG) -> Iterator[Pair]:
        left, right = self.members["left"], self.members["right"]
        with TlsListener(right, config, lambda name: name == "left") as listener:
            accepting = run(listener.accept, deadline_s=DEADLINE_S)
            dialed = dial_tls(listener.address, left, config, lambda name: name == "right", deadline_s=DEADLINE_S)
            with dialed, accepting.result(DEADLINE_S) as accepted:
                yield dialed, accepted

    @contextlib.contextmanager
    def raw(self, config: LinkConfig = CONFIG) -> Iterator[tuple[StreamLink, Raw]]:
        """A malicious member of the run: its TLS is valid, its frames are not."""
        context = tls_context(self.members["left"], server_side=False)
        with TlsListener(self.members["right"], config) as listener:
            accepting = run(listener.accept, deadline_s=DEADLINE_S)
            plain = socket.create_connection(listener.address, timeout=DEADLINE_S)
            with accept_peer(context.wrap_socket(plain)) as far, accepting.result(DEADLINE_S) as link:
                yield link, far


def accept_peer(sock: ssl.SSLSocket) -> ssl.SSLSocket:
    """Exchange acceptance after the TLS handshake, independently of the production code."""
    sock.sendall(b"\x01")
    assert sock.recv(1) == b"\x01"
    return sock


class Members:
    """The identities of one run, made on demand."""

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
