"""The relay: a pipe of bytes between two guests who could not reach each other.

Both dial the relay and present the same token; whatever one sends then goes to the other. What they say
is TLS between the two of them, so the relay carries ciphertext and could not read it if it wanted.

A guest that reads slowly stops the one that writes: when more than `waiting_bytes` wait for it, the relay
no longer reads from the other. When one leaves, the other is let go once it has been given what was left.
Of two connections of one end the newer counts: the older is one that this end has given up.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import cast

from ravnest.core.config import config, require
from ravnest.core.errors import FrameError
from ravnest.core.ids import check_id
from ravnest.net.addresses import Address, plain_host, show
from ravnest.net.hello import Answer, Join, Joined, Observe, Refused, Seen, encode_note, take_hello

__all__ = ["HubConfig", "PairStats", "RelayHub"]

_MIN_TOKEN_LETTERS = 16


def _ignore(address: str, reason: str) -> None:
    """Nobody asked to hear of refusals."""


@config
class HubConfig:
    """How much a relay carries and how patient it is; `on_refused(address, reason)` hears of guests sent away."""

    max_pairs: int = 256
    max_guests: int = 1024
    waiting_bytes: int = 256 * 1024
    hello_s: float = 10.0
    wait_s: float = 60.0
    idle_s: float = 3600.0
    on_refused: Callable[[str, str], None] = _ignore

    def __post_init__(self) -> None:
        require(self.max_pairs > 0, "max_pairs must be at least 1")
        require(self.max_guests >= 2, "max_guests must be at least 2: a pair is two guests")
        require(self.waiting_bytes > 0, "waiting_bytes must be at least 1")
        for name in ("hello_s", "wait_s", "idle_s"):
            require(getattr(self, name) > 0, f"{name} must be more than 0 seconds")


@dataclasses.dataclass(frozen=True)
class PairStats:
    """What a pair has sent through the relay: bytes from the first to the second, and back."""

    names: tuple[str, str]
    carried_bytes: tuple[int, int]
    num_joined: int
    """How often both ends have come together."""
    is_joined: bool


class _Pair:
    """Two ends that may be joined, and who of them is here."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names
        self.here: dict[str, _Guest] = {}
        self.carried_bytes = dict.fromkeys(names, 0)
        self.num_joined = 0

    def stats(self) -> PairStats:
        first, second = self.names
        carried_bytes = self.carried_bytes[first], self.carried_bytes[second]
        return PairStats(self.names, carried_bytes, self.num_joined, len(self.here) == 2)


class RelayHub:
    """Joins guests in pairs. It is the factory of their protocols: give it to a `Front` or `create_server`."""

    def __init__(self, config: HubConfig | None = None) -> None:
        self.config = config or HubConfig()
        self._pairs: dict[str, _Pair] = {}
        self._guests: set[_Guest] = set()

    def __call__(self) -> asyncio.Protocol:
        return _Guest(self)

    def open(self, token: str, names: tuple[str, str]) -> None:
        """Let the two nodes of these names meet here, whoever of them shows this token."""
        require(len(token) >= _MIN_TOKEN_LETTERS, f"a token has at least {_MIN_TOKEN_LETTERS} letters, drawn at random")
        require(len({check_id(name) for name in names}) == 2, f"a pair is two nodes, not {names}")
        require(token not in self._pairs, "this token is in use: draw another")
        self._pairs[token] = _Pair(names)

    def close(self, token: str) -> None:
        """No more of this pair: whoever of it is here is sent away."""
        pair = self._pairs.pop(token, None)
        for guest in list(pair.here.values() if pair else ()):
            guest.leave()

    def close_all(self) -> None:
        self._pairs.clear()
        for guest in list(self._guests):
            guest.leave()

    def stats(self) -> list[PairStats]:
        return [pair.stats() for pair in self._pairs.values()]

    def waiting_bytes(self) -> int:
        """What waits in the relay for guests who read slowly."""
        return sum(guest.transport.get_write_buffer_size() for guest in self._guests)

    def enter(self, guest: _Guest) -> bool:
        if len(self._guests) >= self.config.max_guests:
            guest.refuse(f"the relay has {len(self._guests)} guests already")
            return False
        self._guests.add(guest)
        return True

    def left(self, guest: _Guest) -> None:
        self._guests.discard(guest)

    def join(self, guest: _Guest, hello: Join) -> None:
        pair = self._pairs.get(hello.token)
        if pair is None or hello.name not in pair.names:
            guest.refuse("nobody is expected with this token: it is wrong, or of an older plan")
            return
        if not pair.here and sum(bool(pair.here) for pair in self._pairs.values()) >= self.config.max_pairs:
            guest.refuse(f"the relay carries {self.config.max_pairs} pairs already")
            return
        for older in list(pair.here.values()):
            if older.name == hello.name or older.partner is not None:
                older.leave()
        guest.wait_in(pair, hello.name)
        if len(pair.here) == 2:
            pair.num_joined += 1
            first, second = pair.here.values()
            first.meet(second)
            second.meet(first)


class _Guest(asyncio.Protocol):
    """One connection: says hello, waits for its partner, then passes on what it sends."""

    def __init__(self, hub: RelayHub) -> None:
        self._hub = hub
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arrived = bytearray()
        self._has_said_hello = False
        self._moved_s = 0.0
        self._pair: _Pair | None = None
        self.name = ""
        self.partner: _Guest | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "a guest is used while it is connected"
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._hub.enter(self):
            self._transport.set_write_buffer_limits(high=self._hub.config.waiting_bytes)
            self._expect(self._hub.config.hello_s, "it did not say hello")

    def data_received(self, data: bytes) -> None:
        if self.partner is not None:
            self._pass_on(data, self.partner)
        elif self._has_said_hello:
            self.refuse("it spoke before the other end was there")
        elif not self.transport.is_closing():
            self._arrived += data
            self._hear_hello()

    def pause_writing(self) -> None:
        if self.partner is not None:
            self.partner.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.partner is not None:
            self.partner.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.leave()
        self._hub.left(self)

    def wait_in(self, pair: _Pair, name: str) -> None:
        self._pair, self.name = pair, name
        pair.here[name] = self
        self._expect(self._hub.config.wait_s, "the other end did not come")

    def meet(self, partner: _Guest) -> None:
        self.partner = partner
        self._say(Joined(partner.name))
        self._moved_s = asyncio.get_running_loop().time()
        self._watch_idle()

    def refuse(self, reason: str) -> None:
        address = show(_seen(self.transport))
        self._say(Refused(reason))
        self.leave()
        self._hub.config.on_refused(address, reason)

    def leave(self) -> None:
        """Close, after what waits for this guest has been sent; its partner goes too."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pair is not None and self._pair.here.get(self.name) is self:
            del self._pair.here[self.name]
        partner, self.partner = self.partner, None
        self.transport.close()
        if partner is not None:
            partner.leave()

    def _hear_hello(self) -> None:
        try:
            hello = take_hello(self._arrived)
        except FrameError as error:
            self.refuse(str(error))
            return
        if hello is None:
            return
        self._has_said_hello = True
        if self._arrived:
            self.refuse("it spoke before the other end was there")
        elif isinstance(hello, Observe):
            self._say(Seen(*_seen(self.transport)))
            self._expect(self._hub.config.idle_s, "it stayed too long")
        else:
            self._hub.join(self, hello)

    def _pass_on(self, data: bytes, partner: _Guest) -> None:
        self._moved_s = asyncio.get_running_loop().time()
        if self._pair is not None:
            self._pair.carried_bytes[self.name] += len(data)
        partner.transport.write(data)

    def _say(self, note: Answer) -> None:
        self.transport.write(encode_note(note))

    def _expect(self, within_s: float, otherwise: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(within_s, lambda: self.refuse(f"{otherwise} within {within_s:g} s"))

    def _watch_idle(self) -> None:
        """Leave when neither end has sent anything for `idle_s`; else look again when that could be."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        moved_s = max(self._moved_s, self.partner._moved_s if self.partner is not None else 0.0)
        left_s = moved_s + self._hub.config.idle_s - loop.time()
        if left_s <= 0:
            self.leave()
        else:
            self._timer = loop.call_later(left_s, self._watch_idle)


def _seen(transport: asyncio.Transport) -> Address:
    name = transport.get_extra_info("peername")
    return (plain_host(name[0]), name[1]) if name else ("somebody who left", 0)
