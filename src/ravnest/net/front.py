"""One TLS port for all that a coordinator offers: who asks for what in the handshake (ALPN) gets it.

A connection is counted from its first moment, before TLS, so that thousands that never finish the
handshake are bounded: in all, per network address, and in those still shaking hands, of which the oldest
is sent away for a newcomer. An IPv6 home has 2**64 addresses, so those of one /64 count as one.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

from ravnest.core.config import config, require
from ravnest.net.addresses import home_of, plain_host, show
from ravnest.net.hello import FEED_PROTOCOL, RELAY_PROTOCOL
from ravnest.net.identity import Identity
from ravnest.net.tls import tls_context, tune

__all__ = ["Front", "FrontConfig", "ProtocolFactory", "front_context"]

ProtocolFactory: TypeAlias = Callable[[], asyncio.Protocol]

# asyncio keeps a buffer for every TLS connection, from its first moment to its last, and fills it with zeros: a quarter
# of a megabyte each if it is not told otherwise. Smaller ones take less memory and, at 32 KiB, half the CPU per byte.
_BUFFER_BYTES = 32 * 1024


def _ignore(address: str, reason: str) -> None:
    """Nobody asked to hear of refusals."""


@config
class FrontConfig:
    """How many come in and how long they may take; `on_refused(address, reason)` hears of those sent away."""

    max_connections: int = 4096
    max_per_address: int = 512
    max_handshakes: int = 128
    handshake_s: float = 10.0
    first_word_s: float = 10.0
    goodbye_s: float = 10.0
    on_refused: Callable[[str, str], None] = _ignore

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_per_address", "max_handshakes"):
            require(getattr(self, name) > 0, f"{name} must be at least 1")
        for name in ("handshake_s", "first_word_s", "goodbye_s"):
            require(getattr(self, name) > 0, f"{name} must be more than 0 seconds")


def front_context(identity: Identity) -> ssl.SSLContext:
    """TLS 1.3 with the coordinator's certificate; guests may prove that they are members, but need not."""
    context = tls_context(identity, server_side=True)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.set_alpn_protocols([RELAY_PROTOCOL, FEED_PROTOCOL, "http/1.1"])
    return context


class Front:
    """Give it to `loop.create_server` (without ssl: it does TLS itself).

    `by_protocol` says what to make of a connection that asked for that name; `otherwise` of all others.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        by_protocol: Mapping[str, ProtocolFactory],
        otherwise: ProtocolFactory,
        config: FrontConfig | None = None,
    ) -> None:
        self.context, self.config = context, config or FrontConfig()
        self._by_protocol, self._otherwise = dict(by_protocol), otherwise
        asyncio.sslproto.SSLProtocol.max_size = _BUFFER_BYTES  # there is no way to say it for our own connections only
        self._inside: set[_Visitor] = set()
        self._shaking: dict[_Visitor, None] = {}  # in order of arrival
        self._per_home: Counter[str] = Counter()

    def __call__(self) -> asyncio.Protocol:
        return _Visitor(self)

    @property
    def num_connections(self) -> int:
        return len(self._inside)

    @property
    def num_handshakes(self) -> int:
        return len(self._shaking)

    def close(self) -> None:
        """Send everybody away; closing the server that accepts is for whoever made it."""
        for visitor in list(self._inside):
            visitor.send_away()
            self.leave(visitor)

    def enter(self, visitor: _Visitor) -> bool:
        """Count it in, or say why not."""
        limits = self.config
        if len(self._inside) >= limits.max_connections:
            self.refuse(visitor, f"there are {len(self._inside)} connections already")
            return False
        if self._per_home[visitor.home] >= limits.max_per_address:
            self.refuse(visitor, f"there are {limits.max_per_address} connections from there already")
            return False
        if len(self._shaking) >= limits.max_handshakes:
            self.refuse(next(iter(self._shaking)), "it was the slowest of too many that still shake hands")
        self._inside.add(visitor)
        self._shaking[visitor] = None
        self._per_home[visitor.home] += 1
        return True

    def shaken(self, visitor: _Visitor) -> None:
        self._shaking.pop(visitor, None)

    def leave(self, visitor: _Visitor) -> None:
        self._shaking.pop(visitor, None)
        if visitor in self._inside:
            self._inside.discard(visitor)
            self._per_home[visitor.home] -= 1
            if not self._per_home[visitor.home]:
                del self._per_home[visitor.home]

    def refuse(self, visitor: _Visitor, reason: str) -> None:
        visitor.send_away()
        self.leave(visitor)
        self.config.on_refused(visitor.address, reason)

    def protocol_for(self, transport: asyncio.Transport) -> asyncio.Protocol:
        asked = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        return self._by_protocol.get(asked, self._otherwise)()


class _Visitor(asyncio.Protocol):
    """A connection from its first moment to its last; once it is known what for, `_served` deals with it."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._plain: asyncio.Transport | None = None
        self._shaking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._early = bytearray()
        self._served: asyncio.Protocol | None = None
        self.address = self.home = "somebody who left"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast("asyncio.Transport", transport)
        if name := transport.get_extra_info("peername"):
            host = plain_host(name[0])
            self.address, self.home = show((host, name[1])), home_of(host)
        if self._front.enter(self):
            self._plain.pause_reading()
            tune(transport.get_extra_info("socket"))
            self._shaking = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        if self._served is None:
            self._early += data  # came with the end of the handshake, a moment before we are told of that
        else:
            self._has_spoken()
            self._served.data_received(data)

    def eof_received(self) -> bool | None:
        return self._served.eof_received() if self._served is not None else None

    def pause_writing(self) -> None:
        if self._served is not None:
            self._served.pause_writing()

    def resume_writing(self) -> None:
        if self._served is not None:
            self._served.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._has_spoken()
        self._front.leave(self)
        if self._served is not None:
            self._served.connection_lost(error)

    def send_away(self) -> None:
        # A handshake that begins on a lost connection would never be told so. And the task is let go: it would hold
        # this visitor by the frames of its error, and their buffers would wait for the collector of cycles.
        shaking, self._shaking = self._shaking, None
        if shaking is not None:
            shaking.cancel()
        if self._plain is not None:
            self._plain.abort()

    async def _shake_hands(self) -> None:
        limits = self._front.config
        assert self._plain is not None
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self._plain,
                self,
                self._front.context,
                server_side=True,
                ssl_handshake_timeout=limits.handshake_s,
                ssl_shutdown_timeout=limits.goodbye_s,
            )
        except OSError as error:  # TLS errors and the timeout are OSErrors too
            self._front.refuse(self, f"the handshake failed: {error}")
            return
        self._front.shaken(self)
        if transport is None or transport.is_closing():  # it was sent away meanwhile
            self._front.leave(self)
            return
        self._serve(transport)

    def _serve(self, transport: asyncio.Transport) -> None:
        wait_s = self._front.config.first_word_s
        self._timer = asyncio.get_running_loop().call_later(
            wait_s, lambda: self._front.refuse(self, f"it said nothing for {wait_s:g} s")
        )
        self._served = self._front.protocol_for(transport)
        self._served.connection_made(transport)
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            self.data_received(early)

    def _has_spoken(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
