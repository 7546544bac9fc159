"""From a way to a connection: dial, be joined or punch through, and prove to each other who is there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import ssl
import threading
from dataclasses import dataclass

from ravnest.core.errors import LinkClosed, LinkError
from ravnest.net.addresses import Address, show
from ravnest.net.agree import Introduction, leads
from ravnest.net.converse import converse
from ravnest.net.handshake import TlsChannel, shake_hands
from ravnest.net.identity import Identity
from ravnest.net.punch import dial_words, socket_at
from ravnest.net.tls import tls_context, tune
from ravnest.net.tunnel import Observation, RelayInfo, observe, relay_context, tunnel
from ravnest.net.ways import How, PeerInfo, ReachConfig, Way

__all__ = ["Connection", "Contexts", "Dialler"]


@dataclass(frozen=True, eq=False)
class Connection:
    """A connection to a proven peer that is not a link yet; `words` say how it came about."""

    channel: TlsChannel
    sock: socket.socket
    peer: str
    how: How
    words: str
    is_server: bool
    heard: Introduction | None = None

    def close(self) -> None:
        self.sock.close()


class Contexts:
    """What TLS needs of this node's identity, read from its files once."""

    def __init__(self, identity: Identity) -> None:
        self.client = tls_context(identity, server_side=False)
        self.server = tls_context(identity, server_side=True)
        self.relay = relay_context(identity)

    def side(self, *, is_server: bool) -> ssl.SSLContext:
        return self.server if is_server else self.client


class Dialler:
    """Dials for the node `me`, which listens on `port`; used in one asyncio loop."""

    def __init__(self, me: str, port: int, contexts: Contexts, config: ReachConfig) -> None:
        self.me, self.port = me, port
        self._contexts, self._config = contexts, config

    async def connect(self, way: Way, peer: PeerInfo) -> Connection:
        if way.how == "direct":
            return await self._direct(way, peer.name)
        if way.how == "punched":
            return await self._punched(way, peer.name)
        assert peer.relay is not None, "a way through a relay exists only where there is one"
        return await self._relayed(peer.relay, peer.name)

    async def observe(self, relay: RelayInfo) -> Observation:
        """Where the relay sees what comes from the port that this node listens on."""
        target = (await _resolve(relay.address))[0]
        sock = socket_at(self.port, target)
        try:
            await _connect(sock, target)
            return await converse(observe(sock, relay, self._contexts.relay), sock)
        except BaseException:
            sock.close()
            raise

    async def _direct(self, way: Way, peer: str) -> Connection:
        sock = _socket_for(way.address)
        try:
            async with asyncio.timeout(self._config.try_s):
                await _connect(sock, way.address)
                return await self._prove(sock, way, peer, is_server=False)
        except BaseException:
            sock.close()
            raise

    async def _punched(self, way: Way, peer: str) -> Connection:
        sock = socket_at(self.port, way.address)
        try:
            async with asyncio.timeout(self._config.punch_try_s):
                await _connect(sock, way.address)
            async with asyncio.timeout(self._config.try_s):
                is_server = await converse(dial_words(sock, is_smaller=leads(self.me, peer)), sock)
                return await self._prove(sock, way, peer, is_server=is_server)
        except BaseException:
            sock.close()
            raise

    async def _relayed(self, relay: RelayInfo, peer: str) -> Connection:
        """The relay answers when the peer has come too, so only the whole call's deadline bounds it."""
        is_server = not leads(self.me, peer)
        contexts = self._contexts.relay, self._contexts.side(is_server=is_server)
        sock = await self._dial_relay(relay)
        try:
            channel = await converse(tunnel(sock, relay, self.me, peer, contexts), sock)
        except BaseException:
            sock.close()
            raise
        return Connection(channel, sock, peer, "relayed", f"through {relay.name} at {show(relay.address)}", is_server)

    async def _dial_relay(self, relay: RelayInfo) -> socket.socket:
        reason: LinkError = LinkClosed("its name has no address")
        for address in await _resolve(relay.address):
            sock = _socket_for(address)
            try:
                async with asyncio.timeout(self._config.try_s):
                    await _connect(sock, address)
                return sock
            except TimeoutError:
                sock.close()
                reason = LinkClosed(f"{show(address)} did not answer")
            except LinkError as error:
                sock.close()
                reason = error
            except BaseException:
                sock.close()
                raise
        raise reason

    async def _prove(self, sock: socket.socket, way: Way, peer: str, *, is_server: bool) -> Connection:
        tune(sock)
        channel = TlsChannel(sock, self._contexts.side(is_server=is_server), server_side=is_server)
        await converse(shake_hands(channel, lambda name: name == peer), sock)
        words = f"dialled {show(way.address)}" + (f" from port {self.port}" if way.how == "punched" else "")
        return Connection(channel, sock, peer, way.how, words, is_server)


def _socket_for(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


async def _connect(sock: socket.socket, address: Address) -> None:
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except TimeoutError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio puts its own words over it
        raise LinkClosed(f"cannot reach {show(address)}: {reason}") from error


async def _resolve(address: Address) -> list[Address]:
    """The numeric addresses of a host that may be given by name.

    A name may take half a minute to be found missing. So it is looked up in a thread that nobody waits for;
    those of the loop's own executor are waited for when it closes.
    """
    found: concurrent.futures.Future[list[Address]] = concurrent.futures.Future()
    found.set_running_or_notify_cancel()  # whoever stops waiting for it does not stop it

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            found.set_result([(str(at[0]), int(at[1])) for *_, at in infos])
        except OSError as error:
            found.set_exception(LinkClosed(f"{address[0]} cannot be found: {error}"))

    threading.Thread(target=look_up, name=f"look up {address[0]}", daemon=True).start()
    return await asyncio.wrap_future(found)
