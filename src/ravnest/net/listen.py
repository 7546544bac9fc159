"""Accepting links, several at a time: a peer that is slow to introduce itself keeps nobody else waiting.

What happens between an accepted socket and a link is a *greeting*: a generator that yields the event it
waits for (`selectors.EVENT_*`) and returns the link. One thread, the one in `accept`, runs all of them.
"""

from __future__ import annotations

import dataclasses
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from ravnest.core.config import config, require
from ravnest.core.errors import LinkError, LinkTimeout
from ravnest.net.deadline import Deadline
from ravnest.net.gate import Gate
from ravnest.net.sockets import wait_ready
from ravnest.net.stream import StreamLink

__all__ = ["Greet", "Greeting", "ListenConfig", "Listener", "finish"]

Greeting: TypeAlias = Generator[int, None, StreamLink]
Greet: TypeAlias = Callable[[socket.socket], Greeting]


def _ignore(address: str, reason: LinkError) -> None:
    """Nobody asked to hear of refusals."""


@config
class ListenConfig:
    """How patient a listener is; `on_refused(address, reason)` hears of connections that became no link."""

    greeting_s: float = 10.0
    max_greetings: int = 64
    on_refused: Callable[[str, LinkError], None] = _ignore

    def __post_init__(self) -> None:
        require(self.greeting_s > 0, "greeting_s must be more than 0 seconds")
        require(self.max_greetings > 0, "max_greetings must be at least 1")


def finish(greeting: Greeting, sock: socket.socket, deadline: Deadline) -> StreamLink:
    """Run one greeting to its end; the socket is closed unless it became a link."""
    try:
        while True:
            event = next(greeting)
            if not wait_ready(sock, event, deadline.left_s()):
                raise LinkTimeout(f"the peer did not introduce itself within {deadline.seconds:g} s")
    except StopIteration as done:
        link: StreamLink = done.value
        return link
    except BaseException:
        sock.close()
        raise


@dataclasses.dataclass(eq=False)
class _Guest:
    """A connection that is not a link yet."""

    sock: socket.socket
    address: str
    greeting: Greeting
    deadline: Deadline


class Listener:
    """Hands out links made from the connections of a listening socket, which it owns."""

    def __init__(
        self,
        sock: socket.socket,
        greet: Greet,
        config: ListenConfig,
        on_closed: Callable[[], None] | None = None,
    ) -> None:
        sock.setblocking(False)
        self._sock, self._greet, self._config, self._on_closed = sock, greet, config, on_closed
        self._bell, self._ear = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, self._welcome)
        self._selector.register(self._ear, selectors.EVENT_READ, lambda: None)
        self._guests: dict[_Guest, None] = {}  # in order of arrival
        self._links: deque[StreamLink] = deque()
        self._turn = threading.Lock()
        self._gate = Gate("the listener", self._free)

    @property
    def address(self) -> Any:
        """Where it listens: (host, port) or a path."""
        return self._sock.getsockname()

    def accept(self, *, deadline_s: float) -> StreamLink:
        """The next link; connections that fail to become one are only reported."""
        deadline = Deadline(deadline_s)
        if not self._turn.acquire(timeout=deadline.left_s()):
            raise LinkTimeout(f"the listener was busy for {deadline_s:g} s")
        try:
            with self._gate:
                while not self._links:
                    self._serve(deadline)
                return self._links.popleft()
        finally:
            self._turn.release()

    def close(self) -> None:
        """Stop listening, from any thread; whoever is in `accept` gets `LinkClosed`."""
        self._gate.shut(lambda: self._bell.close())

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _serve(self, deadline: Deadline) -> None:
        """Wait for something to happen and deal with it."""
        nearest_s = min((guest.deadline.left_s() for guest in self._guests), default=deadline.left_s())
        for key, _ in self._selector.select(min(deadline.left_s(), nearest_s)):
            key.data()
        if self._gate.is_shut:
            raise self._gate.closed_here()
        self._send_away_late()
        if not self._links and deadline.passed():
            raise LinkTimeout(f"nobody connected for {deadline.seconds:g} s")

    def _welcome(self) -> None:
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionError):  # it left before it came in
            return
        except OSError as error:
            raise LinkError(f"cannot accept connections: {error}") from error
        sock.setblocking(False)
        guest = _Guest(sock, str(address), self._greet(sock), Deadline(self._config.greeting_s))
        if len(self._guests) >= self._config.max_greetings:
            self._refuse(next(iter(self._guests)), LinkTimeout("it was the slowest of too many connections"))
        self._guests[guest] = None
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._go_on(guest))
        self._go_on(guest)

    def _go_on(self, guest: _Guest) -> None:
        if guest not in self._guests:  # refused earlier in this same turn
            return
        try:
            self._selector.modify(guest.sock, next(guest.greeting), lambda: self._go_on(guest))
        except StopIteration as done:
            self._selector.unregister(guest.sock)
            del self._guests[guest]
            self._links.append(done.value)
        except LinkError as error:
            self._refuse(guest, error)
        except OSError as error:
            self._refuse(guest, LinkError(f"the connection broke while it introduced itself: {error}"))
        except BaseException:
            self._drop(guest)
            raise

    def _send_away_late(self) -> None:
        for guest in [guest for guest in self._guests if guest.deadline.passed()]:
            self._refuse(guest, LinkTimeout(f"it did not introduce itself within {self._config.greeting_s:g} s"))

    def _refuse(self, guest: _Guest, reason: LinkError) -> None:
        self._drop(guest)
        self._config.on_refused(guest.address, reason)

    def _drop(self, guest: _Guest) -> None:
        self._selector.unregister(guest.sock)
        del self._guests[guest]
        guest.sock.close()

    def _free(self) -> None:
        self._selector.close()
        for sock in (self._sock, self._ear, *(guest.sock for guest in self._guests)):
            sock.close()
        for link in self._links:
            link.close()
        if self._on_closed is not None:
            self._on_closed()
