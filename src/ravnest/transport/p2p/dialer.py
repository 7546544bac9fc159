"""Turns a candidate into an authenticated connection: dial directly, punch through NATs, or join at a relay."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import ssl
import threading
from dataclasses import dataclass

from ravnest.errors import LinkClosed, LinkError
from ravnest.transport.address import Address, show
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import Introduction, is_controlling
from ravnest.transport.p2p.candidates import Candidate, ConnectionType, ConnectorConfig, PeerCandidates
from ravnest.transport.p2p.hole_punching import dialing_socket, negotiate_as_dialer
from ravnest.transport.p2p.relay_client import Observation, RelayInfo, observe, open_tunnel, relay_context
from ravnest.transport.socket import run_async
from ravnest.transport.tls import TlsChannel, mutual_handshake, tls_context, tune

__all__ = ["Connection", "Contexts", "Dialer"]


@dataclass(frozen=True, eq=False)
class Connection:
    """A connection to an authenticated peer, before it becomes a link.

    `introduction` is the peer's, if it was received before the connection was assigned to a connector.
    """

    channel: TlsChannel
    sock: socket.socket
    peer: str
    how: ConnectionType
    description: str
    is_server: bool
    introduction: Introduction | None = None

    def close(self) -> None:
        self.sock.close()


class Contexts:
    """TLS contexts of this node's identity, loaded once."""

    def __init__(self, identity: Identity) -> None:
        self.client = tls_context(identity, server_side=False)
        self.server = tls_context(identity, server_side=True)
        self.relay = relay_context(identity)

    def side(self, *, is_server: bool) -> ssl.SSLContext:
        return self.server if is_server else self.client


class Dialer:
    """Dials for the node `me`, which listens on `port`; used in one asyncio loop."""

    def __init__(self, me: str, port: int, contexts: Contexts, config: ConnectorConfig) -> None:
        self.me, self.port = me, port
        self._contexts, self._config = contexts, config

    async def connect(self, candidate: Candidate, peer: PeerCandidates) -> Connection:
        if candidate.how == "direct":
            return await self._connect_direct(candidate, peer.name)
        if candidate.how == "punched":
            return await self._connect_punched(candidate, peer.name)
        assert peer.relay is not None, "a relayed candidate has a relay"
        return await self._connect_relayed(peer.relay, peer.name)

    async def observe(self, relay: RelayInfo) -> Observation:
        """Ask the relay at which address it sees this node's listening port."""
        target = (await _resolve(relay.address))[0]
        sock = dialing_socket(self.port, target)
        try:
            await _connect(sock, target)
            return await run_async(observe(sock, relay, self._contexts.relay), sock)
        except BaseException:
            sock.close()
            raise

    async def _connect_direct(self, candidate: Candidate, peer: str) -> Connection:
        sock = _socket_for(candidate.address)
        try:
            async with asyncio.timeout(self._config.check_timeout_s):
                await _connect(sock, candidate.address)
                return await self._authenticate(sock, candidate, peer, is_server=False)
        except BaseException:
            sock.close()
            raise

    async def _connect_punched(self, candidate: Candidate, peer: str) -> Connection:
        sock = dialing_socket(self.port, candidate.address)
        try:
            async with asyncio.timeout(self._config.punch_timeout_s):
                await _connect(sock, candidate.address)
            async with asyncio.timeout(self._config.check_timeout_s):
                handshake = negotiate_as_dialer(sock, is_controlling=is_controlling(self.me, peer))
                is_server = await run_async(handshake, sock)
                return await self._authenticate(sock, candidate, peer, is_server=is_server)
        except BaseException:
            sock.close()
            raise

    async def _connect_relayed(self, relay: RelayInfo, peer: str) -> Connection:
        """Join at the relay, which responds when the peer has joined too; bounded by the connector's deadline only."""
        is_server = not is_controlling(self.me, peer)
        contexts = self._contexts.relay, self._contexts.side(is_server=is_server)
        sock = await self._dial_relay(relay)
        try:
            channel = await run_async(open_tunnel(sock, relay, self.me, peer, contexts), sock)
        except BaseException:
            sock.close()
            raise
        description = f"through {relay.name} at {show(relay.address)}"
        return Connection(channel, sock, peer, "relayed", description, is_server)

    async def _dial_relay(self, relay: RelayInfo) -> socket.socket:
        reason: LinkError = LinkClosed(f"{relay.address[0]} has no address")
        for address in await _resolve(relay.address):
            sock = _socket_for(address)
            try:
                async with asyncio.timeout(self._config.check_timeout_s):
                    await _connect(sock, address)
                return sock
            except TimeoutError:
                sock.close()
                reason = LinkClosed(f"no answer from {show(address)}")
            except LinkError as error:
                sock.close()
                reason = error
            except BaseException:
                sock.close()
                raise
        raise reason

    async def _authenticate(
        self, sock: socket.socket, candidate: Candidate, peer: str, *, is_server: bool
    ) -> Connection:
        tune(sock)
        channel = TlsChannel(sock, self._contexts.side(is_server=is_server), server_side=is_server)
        await run_async(mutual_handshake(channel, lambda name: name == peer), sock)
        source = f" from port {self.port}" if candidate.how == "punched" else ""
        return Connection(channel, sock, peer, candidate.how, f"dialed {show(candidate.address)}{source}", is_server)


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
        reason = os.strerror(error.errno) if error.errno else str(error)  # asyncio replaces the system's message
        raise LinkClosed(f"cannot reach {show(address)}: {reason}") from error


async def _resolve(address: Address) -> list[Address]:
    """Resolve a host name to numeric addresses.

    A failing lookup may take half a minute. So it runs in a daemon thread: the loop waits for the threads of its own
    executor when it closes.
    """
    result: concurrent.futures.Future[list[Address]] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()  # a cancelled wait does not cancel the lookup

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            result.set_result([(str(at[0]), int(at[1])) for *_, at in infos])
        except OSError as error:
            result.set_exception(LinkClosed(f"cannot resolve {address[0]}: {error}"))

    threading.Thread(target=look_up, name=f"resolve {address[0]}", daemon=True).start()
    return await asyncio.wrap_future(result)
