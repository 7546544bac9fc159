"""Who comes in at a node's port, and to which call it belongs.

A peer may come before this node has been told to expect it (plans arrive at different moments), so a
proven guest waits a while for its call. Whoever is not in the roster, or comes for a link of another
generation, is sent away; so is the oldest of too many who are slow to say who they are.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable

from ravnest.core.config import config, require
from ravnest.core.errors import LinkError
from ravnest.net.addresses import plain_host, show
from ravnest.net.agree import hear_introduction
from ravnest.net.converse import converse
from ravnest.net.dialling import Connection
from ravnest.net.handshake import Allowed, TlsChannel, shake_hands
from ravnest.net.punch import accept_words
from ravnest.net.reach import Call
from ravnest.net.tls import tune

__all__ = ["Reception", "ReceptionConfig"]

_PAUSE_S = 0.1  # before accepting again when the system has no descriptors left


def _ignore(address: str, reason: str) -> None:
    """Nobody asked to hear of refusals."""


@config
class ReceptionConfig:
    """How patient it is; `on_refused(address, reason)` hears of connections that became no link."""

    greeting_s: float = 10.0
    max_greetings: int = 64
    hold_s: float = 30.0
    max_held_per_peer: int = 8
    on_refused: Callable[[str, str], None] = _ignore

    def __post_init__(self) -> None:
        require(self.greeting_s > 0, "greeting_s must be more than 0 seconds")
        require(self.hold_s > 0, "hold_s must be more than 0 seconds")
        require(self.max_greetings > 0, "max_greetings must be at least 1")
        require(self.max_held_per_peer > 0, "max_held_per_peer must be at least 1")


class Reception:
    """Greets what arrives at a listening socket and brings it to the calls; lives in one asyncio loop."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext, allowed: Allowed, config: ReceptionConfig) -> None:
        self._sock, self._tls, self._allowed, self._config = sock, tls, allowed, config
        self._greetings: dict[asyncio.Task[None], str] = {}  # and from where, in order of arrival
        self._calls: dict[tuple[str, bytes], Call] = {}
        self._held: dict[str, deque[Connection]] = {}

    def open(self) -> None:
        """Begin to accept, in the running loop."""
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def expect(self, call: Call) -> None:
        """From now on, and from among those who wait, the peer's connections are for `call`."""
        key = call.peer.name, call.mine.purpose
        if (older := self._calls.get(key)) is not None:
            older.give_up(f"a newer call to {call.peer.name} was made")
        self._calls[key] = call
        for guest in self._held.pop(call.peer.name, ()):
            self._bring(guest)

    def forget(self, call: Call) -> None:
        key = call.peer.name, call.mine.purpose
        if self._calls.get(key) is call:
            del self._calls[key]

    def close(self) -> None:
        """When the loop has ended, and all tasks with it."""
        for guests in self._held.values():
            for guest in guests:
                guest.close()
        self._held.clear()
        self._sock.close()

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionError):  # it left before it came in
            return
        except OSError as error:
            self._config.on_refused("nobody", f"connections cannot be accepted: {error}")
            loop.remove_reader(self._sock)
            loop.call_later(_PAUSE_S, self.open)
            return
        if len(self._greetings) >= self._config.max_greetings:
            self._dismiss_slowest()
        self._start(sock, show((plain_host(address[0]), address[1])))

    def _start(self, sock: socket.socket, address: str) -> None:
        def over(task: asyncio.Task[None]) -> None:
            self._greetings.pop(task, None)
            if task.cancelled():  # perhaps before it began, so it could not close the socket itself
                sock.close()

        task = asyncio.get_running_loop().create_task(self._greet(sock, address))
        self._greetings[task] = address
        task.add_done_callback(over)

    def _dismiss_slowest(self) -> None:
        task = next(iter(self._greetings))
        task.cancel()
        self._config.on_refused(self._greetings.pop(task), "it was the slowest of too many connections")

    async def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            async with asyncio.timeout(self._config.greeting_s):
                self._bring(await self._prove(sock, address))
        except TimeoutError:
            sock.close()
            self._config.on_refused(address, f"it did not introduce itself within {self._config.greeting_s:g} s")
        except (LinkError, OSError) as error:
            sock.close()
            self._config.on_refused(address, str(error))

    async def _prove(self, sock: socket.socket, address: str) -> Connection:
        tune(sock)
        sock.setblocking(False)
        is_punched = await converse(accept_words(sock), sock)
        channel = TlsChannel(sock, self._tls, server_side=True)
        peer = await converse(shake_hands(channel, self._allowed), sock)
        heard = await converse(hear_introduction(channel), sock)
        words = f"{peer} dialled this node from {address}"
        return Connection(channel, sock, peer, "punched" if is_punched else "direct", words, True, heard)

    def _bring(self, guest: Connection) -> None:
        """To its call; to wait, if there is none yet."""
        assert guest.heard is not None, "a guest has introduced itself"
        call = self._calls.get((guest.peer, guest.heard.purpose))
        if call is None:
            self._hold(guest)
            return
        if guest.heard.generation != call.mine.generation:
            found, expected = guest.heard.generation, call.mine.generation
            self._config.on_refused(guest.peer, f"it is of generation {found}, this node of generation {expected}")
        call.welcome(guest)  # which tells the peer our generation before it refuses another

    def _hold(self, guest: Connection) -> None:
        held = self._held.setdefault(guest.peer, deque())
        held.append(guest)
        asyncio.get_running_loop().call_later(
            self._config.hold_s, self._let_go, guest, f"nobody called for it within {self._config.hold_s:g} s"
        )
        if len(held) > self._config.max_held_per_peer:
            self._let_go(held[0], "it was the oldest of too many connections of one peer")

    def _let_go(self, guest: Connection, reason: str) -> None:
        held = self._held.get(guest.peer)
        if held is not None and guest in held:
            held.remove(guest)
            guest.close()
            self._config.on_refused(guest.peer, reason)
            if not held:
                del self._held[guest.peer]
