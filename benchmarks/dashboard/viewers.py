"""Viewers of a dashboard, and a flood of requests to it, in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

import aiohttp

from benchmarks.control.child import serve

_CLIENTS = 32  # of a flood
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)


class Viewers:
    """Pages that read the stream and draw nothing, and requests without end."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._statuses: Counter[str] = Counter()
        self.num_bytes = 0

    async def watch(self, *, link: str, count: int) -> None:
        """Open streams; returns when each has received its first bytes."""
        started = [asyncio.Event() for _ in range(count)]
        self._tasks += [asyncio.create_task(self._watch(link, event)) for event in started]
        async with asyncio.timeout(60):
            for event in started:
                await event.wait()

    async def _watch(self, link: str, started: asyncio.Event) -> None:
        origin, _, token = link.partition("/#token=")
        async with aiohttp.ClientSession(timeout=_TIMEOUT, read_bufsize=1 << 22) as session:
            headers = {"Authorization": f"Bearer {token}"}
            async with session.get(f"{origin}/v1/stream", headers=headers) as answer:
                async for chunk in answer.content.iter_any():
                    self.num_bytes += len(chunk)
                    started.set()

    async def flood(self, *, link: str) -> None:
        """Send requests as fast as answers arrive, each client the next at once, half of them by a new connection."""
        self._tasks += [asyncio.create_task(self._flood(link, keeps=i % 2 == 0)) for i in range(_CLIENTS)]

    async def _flood(self, link: str, *, keeps: bool) -> None:
        origin, _, token = link.partition("/#token=")
        headers = {"Authorization": f"Bearer {token}"}
        connector = aiohttp.TCPConnector(force_close=not keeps)
        async with aiohttp.ClientSession(timeout=_TIMEOUT, connector=connector) as session:
            while True:
                try:
                    async with session.get(f"{origin}/v1/nodes/node-0", headers=headers) as answer:
                        await answer.read()
                        self._statuses[str(answer.status)] += 1
                except aiohttp.ClientError as error:
                    self._statuses[type(error).__name__] += 1
                    await asyncio.sleep(0)

    async def stop(self) -> dict[str, Any]:
        """End all; returns the received bytes and the number of answers by status."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        result = {"bytes": self.num_bytes, "statuses": dict(self._statuses), "cpu_s": time.process_time()}
        self.num_bytes = 0
        self._statuses.clear()
        return result


async def main() -> None:
    viewers = Viewers()
    await serve({name: getattr(viewers, name) for name in ("watch", "flood", "stop")})


if __name__ == "__main__":
    asyncio.run(main())
