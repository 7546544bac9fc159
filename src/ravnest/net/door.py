"""A node's door: the one port where peers come in, and from where this node goes out to them.

A node is reached and reaches through the same port, so that routers let the answers in. One thread runs
an asyncio loop with all connections that are not links yet; links belong to whoever called for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from ravnest.core.errors import LinkClosed, LinkTimeout
from ravnest.net.addresses import Address
from ravnest.net.deadline import Deadline
from ravnest.net.dialling import Contexts, Dialler
from ravnest.net.handshake import Allowed
from ravnest.net.identity import Identity
from ravnest.net.link import LinkConfig
from ravnest.net.punch import listen_reusable
from ravnest.net.reach import Call, Reached
from ravnest.net.reception import Reception, ReceptionConfig
from ravnest.net.tunnel import Observation, RelayInfo
from ravnest.net.ways import Here, PeerInfo, ReachConfig

__all__ = ["Door"]

T = TypeVar("T")

_LEEWAY_S = 5.0  # the loop itself ends a call at its deadline


class Door:
    """Listens at `address` ("::" for IPv6 and IPv4) for the nodes that `allowed` knows: the roster."""

    def __init__(
        self,
        address: Address,
        identity: Identity,
        *,
        allowed: Allowed,
        reception: ReceptionConfig | None = None,
        reach: ReachConfig | None = None,
    ) -> None:
        contexts, self._config = Contexts(identity), reach or ReachConfig()
        sock = listen_reusable(address)
        sock.setblocking(False)
        host, port = sock.getsockname()[:2]
        self.address: Address = (host, port)
        self._dialler = Dialler(identity.name, port, contexts, self._config)
        self._reception = Reception(sock, contexts.server, allowed, reception or ReceptionConfig())
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._loop = self._runner.get_loop()
        self._closing = asyncio.Event()
        self._lock = threading.Lock()  # around the next, so that nothing is begun on a loop that ends
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=f"door {port}", daemon=True)
        self._thread.start()

    def reach(self, peer: PeerInfo, link: LinkConfig, *, here: Here | None = None, deadline_s: float) -> Reached:
        """A link to `peer`, who must call this node too; a newer call to the same peer ends this one."""
        return self._wait_for(self._reach(peer, link, here or Here(), Deadline(deadline_s).seconds), deadline_s)

    def observe(self, relay: RelayInfo, *, deadline_s: float) -> Observation:
        """Where the relay sees this door; keep it open for as long as peers should come through a router."""
        return self._wait_for(self._observe(relay, Deadline(deadline_s).seconds), deadline_s)

    def close(self) -> None:
        """Stop listening and end all calls, which get `LinkClosed`; links that were made go on."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            with self._runner:  # which cancels all that still runs
                self._runner.run(self._serve())
        finally:
            self._reception.close()

    async def _serve(self) -> None:
        self._reception.open()
        await self._closing.wait()

    async def _reach(self, peer: PeerInfo, link: LinkConfig, here: Here, deadline_s: float) -> Reached:
        call = Call(peer, link, self._dialler, self._config)
        self._reception.expect(call)
        try:
            return await call.run(here, deadline_s)
        finally:
            self._reception.forget(call)

    async def _observe(self, relay: RelayInfo, deadline_s: float) -> Observation:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._dialler.observe(relay)
        except TimeoutError:
            raise LinkTimeout(f"the relay {relay.name} did not answer within {deadline_s:g} s") from None

    def _wait_for(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        with self._lock:
            if not self._is_open:
                work.close()
                raise LinkClosed("the door was closed on this side")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline_s + _LEEWAY_S)
        except CancelledError:
            raise LinkClosed("the door was closed on this side") from None
        except BaseException:  # an interrupted caller: what was begun for it ends too
            future.cancel()
            raise
