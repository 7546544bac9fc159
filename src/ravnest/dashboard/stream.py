"""Pushes the document of a run to viewers by server-sent events.

One task encodes changes while there are viewers, at most twice a second and with at most 3 % of a core; all viewers
get the same bytes. If that is not enough for all values of a large fleet twice a second, events and curves are sent in
between. Events are sent as soon as they happen (`wake`), at most ten times a second. A viewer whose queue is full is
disconnected: its page connects again and starts with a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from ravnest.dashboard.document import LiveDocument

__all__ = ["Stream"]

_MAX_SHARE = 0.03  # of a core, for all values; writing them to the viewers is not counted
_PAUSE_S = 0.1  # between two messages of events
_MAX_VIEWERS = 64
_MAX_QUEUED = 16  # messages per viewer
_HEARTBEAT_S = 10.0
_SEND_S = 20.0


class _Viewer:
    """A connection. `queue` holds encoded messages; None ends it."""

    def __init__(self, request: web.Request) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_QUEUED)
        self._request = request

    def send(self, message: bytes) -> bool:
        """Queue a message; return whether there was room."""
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            if self._request.transport is not None:
                self._request.transport.abort()
            return False
        return True

    def end(self) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self.queue.put_nowait(None)


class Stream:
    """The viewers of one run. `values` returns the values of the moment, and whether contributions are among them.

    `news` returns the values that are new since its last call, of those that are never changed.
    """

    def __init__(
        self,
        document: LiveDocument,
        values: Callable[[], tuple[Mapping[str, Any], str]],
        news: Callable[[], Mapping[str, Any]] = dict,
        *,
        interval_s: float = 0.5,
    ) -> None:
        self._document, self._values, self._news, self._interval_s = document, values, news, interval_s
        self._viewers: set[_Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._updated_s = -1e9
        self._has_event = asyncio.Event()
        self._is_closed = False
        self.num_dropped = 0

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def wake(self) -> None:
        """Send what is new soon, without waiting for the next interval."""
        self._has_event.set()

    async def serve(self, request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
        """Respond with all changes until the viewer disconnects."""
        if self._is_closed or len(self._viewers) >= _MAX_VIEWERS:
            reason = "the run is ending" if self._is_closed else f"{_MAX_VIEWERS} viewers are connected: try later"
            return web.json_response({"error": reason}, status=503, headers={"Retry-After": "5"})
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        viewer = _Viewer(request)
        self._refresh()
        viewer.send(_message(self._document.snapshot()))
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            await _forward(viewer, response)
        finally:
            self._viewers.discard(viewer)
        return response

    def close(self) -> None:
        """Send the last changes and end all viewers."""
        self._is_closed = True
        if self._viewers:
            self._push()
        for viewer in self._viewers:
            viewer.end()
        if self._task is not None:
            self._task.cancel()

    def _refresh(self) -> None:
        """Bring the document up to date for a snapshot, not more often than the interval."""
        if time.monotonic() - self._updated_s >= self._interval_s:
            self._push()

    def _push(self) -> None:
        values, keep = self._values()
        self._send(self._document.update(values, keep=keep))
        self._updated_s = time.monotonic()

    def _send(self, delta: bytes | None) -> None:
        if delta is None:
            return
        message = _message(delta)
        for viewer in [viewer for viewer in self._viewers if not viewer.send(message)]:
            self._viewers.discard(viewer)
            self.num_dropped += 1

    async def _run(self) -> None:
        try:
            due_s = 0.0
            while self._viewers:
                self._has_event.clear()
                began_s = time.monotonic()
                if began_s >= due_s:
                    spent_s = -time.thread_time()
                    self._push()
                    spent_s += time.thread_time()
                    due_s = max(began_s + self._interval_s, time.monotonic() + spent_s / _MAX_SHARE)
                else:
                    self._send(self._document.add(self._news()))
                await self._wait(min(self._interval_s, due_s - began_s))
        finally:
            self._task = None
            for viewer in self._viewers:  # after an error: their pages connect again
                viewer.end()

    async def _wait(self, seconds: float) -> None:
        """Wait for an event, at least for the pause between two messages, and at most for this time."""
        pause_s = min(_PAUSE_S, seconds)
        await asyncio.sleep(pause_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds - pause_s):
                await self._has_event.wait()


async def _forward(viewer: _Viewer, response: web.StreamResponse) -> None:
    """Write queued messages; a comment from time to time shows that the connection is alive."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while True:
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    message = await viewer.queue.get()
            except TimeoutError:
                message = b": alive\n\n"
            if message is None:
                return
            async with asyncio.timeout(_SEND_S):
                await response.write(message)


def _message(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
