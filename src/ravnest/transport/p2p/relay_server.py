"""The relay: carries bytes between two nodes that could not connect to each other.

Both dial the relay and present the same token; everything that one sends then goes to the other. Their bytes are TLS
between the two of them, which the relay cannot decrypt.

A slow reader stops its partner: while more than `max_buffered_bytes` are queued for it, the relay does not read from
the other end. When one disconnects, the other is disconnected after its queued bytes have been sent. Of two connections
of the same node the newer counts: the node has abandoned the older one.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import cast

from ravnest.core.config import config, require
from ravnest.core.ids import check_id
from ravnest.errors import FrameError
from ravnest.protocol.relay import (
    ObserveAddress,
    ObservedAddress,
    RelayJoin,
    RelayJoined,
    RelayRejected,
    RelayResponse,
    encode_message,
    take_request,
)
from ravnest.transport.address import Address, plain_host, show

__all__ = ["RelayServerConfig", "PairStats", "RelayServer"]

_MIN_TOKEN_CHARS = 16
_EARLY_DATA = "data sent before the other end joined"


def _ignore(address: str, reason: str) -> None:
    """Do not report rejections."""


@config
class RelayServerConfig:
    """Limits and timeouts of a relay; `on_rejected(address, reason)` is called for each rejected client."""

    max_pairs: int = 256
    max_clients: int = 1024
    max_buffered_bytes: int = 256 * 1024
    request_timeout_s: float = 10.0
    partner_timeout_s: float = 60.0
    idle_timeout_s: float = 3600.0
    on_rejected: Callable[[str, str], None] = _ignore

    def __post_init__(self) -> None:
        for name in ("max_pairs", "max_buffered_bytes", "request_timeout_s", "partner_timeout_s", "idle_timeout_s"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")
        require(self.max_clients >= 2, f"max_clients must be >= 2, the size of a pair, got {self.max_clients}")


@dataclasses.dataclass(frozen=True)
class PairStats:
    """Traffic of a pair: bytes from the first to the second node, and back."""

    names: tuple[str, str]
    carried_bytes: tuple[int, int]
    num_joined: int
    """Number of times that both ends were joined."""
    is_joined: bool


class _Pair:
    """Two nodes that may be joined, and their present connections."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names
        self.clients: dict[str, _RelayClient] = {}
        self.carried_bytes = dict.fromkeys(names, 0)
        self.num_joined = 0

    def stats(self) -> PairStats:
        first, second = self.names
        carried_bytes = self.carried_bytes[first], self.carried_bytes[second]
        return PairStats(self.names, carried_bytes, self.num_joined, len(self.clients) == 2)


class RelayServer:
    """Joins clients in pairs. It is an asyncio protocol factory, for an `AlpnServer` or `create_server`."""

    def __init__(self, config: RelayServerConfig | None = None) -> None:
        self.config = config or RelayServerConfig()
        self.clients: set[_RelayClient] = set()
        self._pairs: dict[str, _Pair] = {}

    def __call__(self) -> asyncio.Protocol:
        return _RelayClient(self)

    def open(self, token: str, names: tuple[str, str]) -> None:
        """Allow the two nodes of these names to join with this token."""
        require(
            len(token) >= _MIN_TOKEN_CHARS, f"token must have at least {_MIN_TOKEN_CHARS} characters, got {len(token)}"
        )
        require(len({check_id(name) for name in names}) == 2, f"a pair must be two nodes, got {names}")
        require(token not in self._pairs, "token is in use: draw another")
        self._pairs[token] = _Pair(names)

    def close(self, token: str) -> None:
        """Remove the pair of this token and disconnect its clients."""
        pair = self._pairs.pop(token, None)
        for client in list(pair.clients.values() if pair else ()):
            client.disconnect()

    def close_all(self) -> None:
        self._pairs.clear()
        for client in list(self.clients):
            client.disconnect()

    def stats(self) -> list[PairStats]:
        return [pair.stats() for pair in self._pairs.values()]

    def add(self, client: _RelayClient) -> bool:
        if len(self.clients) >= self.config.max_clients:
            client.reject(f"relay is full: {len(self.clients)} clients are connected")
            return False
        self.clients.add(client)
        return True

    def join(self, client: _RelayClient, request: RelayJoin) -> None:
        pair = self._pairs.get(request.token)
        if pair is None or request.name not in pair.names:
            client.reject("unknown token: it is wrong, or of an older plan")
            return
        if not pair.clients and sum(bool(pair.clients) for pair in self._pairs.values()) >= self.config.max_pairs:
            client.reject(f"relay is full: {self.config.max_pairs} pairs are connected")
            return
        for older in list(pair.clients.values()):
            if older.name == request.name or older.partner is not None:
                older.disconnect()
        client.wait_for_partner(pair, request.name)
        if len(pair.clients) == 2:
            pair.num_joined += 1
            first, second = pair.clients.values()
            first.join(second)
            second.join(first)


class _RelayClient(asyncio.Protocol):
    """One connection: sends a request, waits for its partner, then exchanges bytes with it."""

    def __init__(self, server: RelayServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._received = bytearray()
        self._has_request = False
        self._active_s = 0.0
        self._pair: _Pair | None = None
        self.name = ""
        self.partner: _RelayClient | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "used only while connected"
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._server.add(self):
            self._transport.set_write_buffer_limits(high=self._server.config.max_buffered_bytes)
            self._reject_after(self._server.config.request_timeout_s, "no request")

    def data_received(self, data: bytes) -> None:
        if self.partner is not None:
            self._forward(data, self.partner)
        elif self._has_request:
            self.reject(_EARLY_DATA)
        elif not self.transport.is_closing():
            self._received += data
            self._handle_request()

    def pause_writing(self) -> None:
        if self.partner is not None:
            self.partner.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.partner is not None:
            self.partner.transport.resume_reading()

    def eof_received(self) -> None:
        # This end has closed and reads no more. asyncio would wait without limit to send the bytes buffered for it.
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.disconnect()
        self._server.clients.discard(self)

    def wait_for_partner(self, pair: _Pair, name: str) -> None:
        self._pair, self.name = pair, name
        pair.clients[name] = self
        self._reject_after(self._server.config.partner_timeout_s, "the other end did not join")

    def join(self, partner: _RelayClient) -> None:
        self.partner = partner
        self._send(RelayJoined(partner.name))
        self._active_s = asyncio.get_running_loop().time()
        self._watch_idle()

    def reject(self, reason: str) -> None:
        address = show(_peer_address(self.transport))
        self._send(RelayRejected(reason))
        self.disconnect()
        self._server.config.on_rejected(address, reason)

    def disconnect(self) -> None:
        """Close after the queued bytes have been sent, together with the partner."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pair is not None and self._pair.clients.get(self.name) is self:
            del self._pair.clients[self.name]
        partner, self.partner = self.partner, None
        self.transport.close()
        if partner is not None:
            partner.disconnect()

    def _handle_request(self) -> None:
        try:
            request = take_request(self._received)
        except FrameError as error:
            self.reject(str(error))
            return
        if request is None:
            return
        self._has_request = True
        if self._received:
            self.reject(_EARLY_DATA)
        elif isinstance(request, ObserveAddress):
            self._send(ObservedAddress(*_peer_address(self.transport)))
            self._reject_after(self._server.config.idle_timeout_s, "observation was not closed")
        else:
            self._server.join(self, request)

    def _forward(self, data: bytes, partner: _RelayClient) -> None:
        self._active_s = asyncio.get_running_loop().time()
        if self._pair is not None:
            self._pair.carried_bytes[self.name] += len(data)
        partner.transport.write(data)

    def _send(self, message: RelayResponse) -> None:
        self.transport.write(encode_message(message))

    def _reject_after(self, timeout_s: float, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, lambda: self.reject(f"{reason} within {timeout_s:g} s"))

    def _watch_idle(self) -> None:
        """Disconnect if neither end has sent anything for `idle_timeout_s`; check again at the earliest such time."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        active_s = max(self._active_s, self.partner._active_s if self.partner is not None else 0.0)
        left_s = active_s + self._server.config.idle_timeout_s - loop.time()
        if left_s <= 0:
            self.disconnect()
        else:
            self._timer = loop.call_later(left_s, self._watch_idle)


def _peer_address(transport: asyncio.Transport) -> Address:
    name = transport.get_extra_info("peername")
    return (plain_host(name[0]), name[1]) if name else ("unknown address", 0)
