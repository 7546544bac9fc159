"""Pumps messages between a compute loop and a link: one thread sends from a short queue, one receives.

The loop waits for the network only when the queue is full: that is the backpressure. A `Pump` owns both threads and the
link; closing it ends all three.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from ravnest.core.clock import Deadline
from ravnest.core.config import config, require
from ravnest.core.rate_limit import RateLimiter
from ravnest.errors import LinkClosed, LinkTimeout
from ravnest.transport.link import Link, Place

__all__ = ["OnError", "Pump", "PumpConfig"]

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


OnError: TypeAlias = Callable[[Exception], None]
OnMessage: TypeAlias = Callable[[msgspec.Struct, Sequence[memoryview]], None]


@config
class PumpConfig:
    """`capacity` messages may be queued; a frame may take `frame_s`, a callback `callback_s`.

    `rate_limiter` delays frames; several pumps may share one.
    """

    capacity: int = 8
    frame_s: float = 60.0
    callback_s: float = 10.0
    rate_limiter: RateLimiter | None = None

    def __post_init__(self) -> None:
        require(self.capacity > 0, f"capacity must be > 0, got {self.capacity}")
        for name in ("frame_s", "callback_s"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")


class _QueuedFrame(NamedTuple):
    header: msgspec.Struct
    buffers: Sequence[ReadableBuffer]
    on_sent: Callable[[], None] | None


class Sender:
    """Sends queued messages in order, in the one thread that calls `run`."""

    def __init__(self, link: Link, config: PumpConfig) -> None:
        self._link, self._config = link, config
        self._frames: deque[_QueuedFrame] = deque()  # the first is being sent
        self._stopped = False
        self._changed = threading.Condition()

    @property
    def depth(self) -> int:
        """Number of messages queued and not yet sent."""
        return len(self._frames)

    def put(
        self,
        header: msgspec.Struct,
        buffers: Sequence[ReadableBuffer] = (),
        on_sent: Callable[[], None] | None = None,
        *,
        deadline_s: float,
    ) -> None:
        """Queue a message; waits while the queue is full. The buffers must not change before `on_sent`."""
        with self._changed:
            if not self._changed.wait_for(self._can_put, Deadline(deadline_s).left_s()):
                raise LinkTimeout(f"{self._link.peer} accepted none of {self.depth} messages for {deadline_s:g} s")
            if self._stopped:
                raise LinkClosed(f"sender to {self._link.peer} is stopped")
            self._frames.append(_QueuedFrame(header, buffers, on_sent))
            self._changed.notify_all()

    def stop(self) -> None:
        """Accept no more messages; a waiting `put` raises `LinkClosed`. Queued messages are still sent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def drain(self, *, deadline_s: float) -> bool:
        """Wait until the queue is empty or the link is closed; true if everything was sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._frames or self._link.closed, deadline_s)
            return not self._frames

    def run(self) -> None:
        """Send until stopped and empty; propagates errors of the link."""
        while (frame := self._next()) is not None:
            self._throttle(frame)
            self._link.send(frame.header, frame.buffers, deadline_s=self._config.frame_s)
            if frame.on_sent is not None:
                frame.on_sent()
            self._pop()

    def _throttle(self, frame: _QueuedFrame) -> None:
        """Wait for the rate limiter, or until stopped."""
        if self._config.rate_limiter is not None:
            wait_s = self._config.rate_limiter.reserve(sum(memoryview(buffer).nbytes for buffer in frame.buffers))
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, wait_s)

    def _can_put(self) -> bool:
        return self._stopped or len(self._frames) < self._config.capacity

    def _next(self) -> _QueuedFrame | None:
        with self._changed:  # no deadline: an idle sender waits until its owner calls `stop`
            self._changed.wait_for(lambda: self._frames or self._stopped)
            return self._frames[0] if self._frames else None

    def _pop(self) -> None:
        with self._changed:
            self._frames.popleft()
            self._changed.notify_all()


class Receiver:
    """Receives into memory from `place` and passes on each message, in the one thread that calls `run`."""

    def __init__(self, link: Link, place: Place, on_message: OnMessage, config: PumpConfig) -> None:
        self._link, self._place, self._on_message, self._config = link, place, on_message, config
        self._views: Sequence[memoryview] = ()

    def run(self) -> None:
        """Receive until the link is closed; propagates errors of the link and the callbacks."""
        while True:
            try:
                header = self._link.receive(self._placed, deadline_s=self._config.frame_s)
            except LinkTimeout:
                if self._link.closed:
                    raise
                continue  # an idle peer is not an error
            self._on_message(header, self._views)

    def _placed(self, header: msgspec.Struct, lengths: tuple[int, ...]) -> Sequence[memoryview]:
        self._views = self._place(header, lengths)
        return self._views


class Pump:
    """Owns a link, its sender and its receiver. The first failure closes all and is passed to `on_error`."""

    def __init__(
        self,
        link: Link,
        place: Place,
        on_message: OnMessage,
        on_error: OnError,
        config: PumpConfig | None = None,
    ) -> None:
        self._link, self._on_error = link, on_error
        self._config = config or PumpConfig()
        self._sender = Sender(link, self._config)
        self.put = self._sender.put
        self.drain = self._sender.drain
        self._receiver = Receiver(link, place, on_message, self._config)
        self._ending = threading.Lock()  # acquired once, by the first of failure and close; never released
        self._threads = [
            threading.Thread(target=self._supervise, args=(run,), name=f"{what} {link.peer}", daemon=True)
            for what, run in (("send to", self._sender.run), ("receive from", self._receiver.run))
        ]

    def start(self) -> None:
        """Start both threads; messages may arrive before this returns."""
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Number of messages queued and not yet sent."""
        return self._sender.depth

    def close(self, *, flush_s: float = 0.0) -> bool:
        """End both threads and the link; first wait up to `flush_s` for the queue to be sent.

        True if all queued messages were handed to the system. A callback may call this too.
        """
        self._sender.stop()
        is_flushed = self._sender.drain(deadline_s=flush_s)
        self._ending.acquire(blocking=False)
        self._link.close()
        for thread in self._threads:
            self._join(thread)
        return is_flushed

    def __enter__(self) -> Pump:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _join(self, thread: threading.Thread) -> None:
        if thread is threading.current_thread() or thread.ident is None:
            return
        thread.join(self._config.callback_s)
        if thread.is_alive():
            raise LinkTimeout(f"thread {thread.name!r} is stuck in a callback")

    def _supervise(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # any error that ends this thread must reach the owner
            is_first = self._ending.acquire(blocking=False)
            self._link.close()
            self._sender.stop()
            if is_first:
                self._on_error(error)
