"""The two threads that a link needs next to a compute loop: one sends from a short queue, one receives.

The loop never waits for the network unless the queue is full, and then it waits for a slow peer on
purpose: that is the backpressure. One `Pump` owns both threads and the link; closing it ends all three.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from ravnest.core.config import config, require
from ravnest.core.errors import LinkClosed, LinkTimeout
from ravnest.net.deadline import Deadline
from ravnest.net.link import Link, Place
from ravnest.net.pace import Pace

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["OnError", "OnMessage", "Pump", "PumpConfig", "Receiver", "Sender"]

OnError: TypeAlias = Callable[[Exception], None]
OnMessage: TypeAlias = Callable[[msgspec.Struct, Sequence[memoryview]], None]


@config
class PumpConfig:
    """`capacity` messages may wait to be sent; a frame may take `frame_s`, a callback `callback_s`.

    `pace`, if there is one, says when a frame may be sent; several pumps may share it.
    """

    capacity: int = 8
    frame_s: float = 60.0
    callback_s: float = 10.0
    pace: Pace | None = None

    def __post_init__(self) -> None:
        require(self.capacity > 0, "capacity must be at least 1 message")
        require(self.frame_s > 0 and self.callback_s > 0, "frame_s and callback_s must be more than 0 seconds")


class _Parcel(NamedTuple):
    header: msgspec.Struct
    buffers: Sequence[ReadableBuffer]
    on_sent: Callable[[], None] | None


class Sender:
    """Sends what is put, in order; the thread that runs `run` is its only one."""

    def __init__(self, link: Link, config: PumpConfig) -> None:
        self._link, self._config = link, config
        self._parcels: deque[_Parcel] = deque()  # the first is the one being sent
        self._stopped = False
        self._changed = threading.Condition()

    @property
    def depth(self) -> int:
        """Messages put and not yet sent."""
        return len(self._parcels)

    def put(
        self,
        header: msgspec.Struct,
        buffers: Sequence[ReadableBuffer] = (),
        on_sent: Callable[[], None] | None = None,
        *,
        deadline_s: float,
    ) -> None:
        """Queue a message; waits while the queue is full. The buffers are the link's until `on_sent`."""
        with self._changed:
            if not self._changed.wait_for(self._can_put, Deadline(deadline_s).left_s()):
                raise LinkTimeout(f"{self._link.peer} took none of {self.depth} messages for {deadline_s:g} s")
            if self._stopped:
                raise LinkClosed(f"the sender to {self._link.peer} has stopped")
            self._parcels.append(_Parcel(header, buffers, on_sent))
            self._changed.notify_all()

    def stop(self) -> None:
        """Take no more; whoever waits in `put` gets `LinkClosed`. What was put is still sent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def drain(self, *, deadline_s: float) -> bool:
        """Wait until all that was put has been sent, or the link is closed; true if it was sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._parcels or self._link.closed, deadline_s)
            return not self._parcels

    def run(self) -> None:
        """Send until stopped and empty; raises what the link raises."""
        while (parcel := self._next()) is not None:
            self._keep_pace(parcel)
            self._link.send(parcel.header, parcel.buffers, deadline_s=self._config.frame_s)
            if parcel.on_sent is not None:
                parcel.on_sent()
            self._sent()

    def _keep_pace(self, parcel: _Parcel) -> None:
        """Wait for the parcel's turn; whoever was told to stop leaves without."""
        if self._config.pace is not None:
            wait_s = self._config.pace.book(sum(memoryview(buffer).nbytes for buffer in parcel.buffers))
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, wait_s)

    def _can_put(self) -> bool:
        return self._stopped or len(self._parcels) < self._config.capacity

    def _next(self) -> _Parcel | None:
        with self._changed:  # no deadline: an idle sender waits for its owner, who ends it with `stop`
            self._changed.wait_for(lambda: self._parcels or self._stopped)
            return self._parcels[0] if self._parcels else None

    def _sent(self) -> None:
        with self._changed:
            self._parcels.popleft()
            self._changed.notify_all()


class Receiver:
    """Receives into what `place` returns and hands on each message; the thread in `run` is its only one."""

    def __init__(self, link: Link, place: Place, on_message: OnMessage, config: PumpConfig) -> None:
        self._link, self._place, self._on_message, self._config = link, place, on_message, config
        self._views: Sequence[memoryview] = ()

    def run(self) -> None:
        """Receive until the link is closed; raises what the link and the callbacks raise."""
        while True:
            try:
                header = self._link.receive(self._placed, deadline_s=self._config.frame_s)
            except LinkTimeout:
                if self._link.closed:
                    raise
                continue  # a peer with nothing to say is no error
            self._on_message(header, self._views)

    def _placed(self, header: msgspec.Struct, lengths: tuple[int, ...]) -> Sequence[memoryview]:
        self._views = self._place(header, lengths)
        return self._views


class Pump:
    """Owns a link, its sender and its receiver. The first failure closes all and is told to `on_error`."""

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
        self._ending = threading.Lock()  # taken once, by the first of failure and close; never released
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
        """Messages put and not yet sent."""
        return self._sender.depth

    def close(self, *, flush_s: float = 0.0) -> bool:
        """End both threads and the link; first wait up to `flush_s` for the queue to go out.

        True if everything that was put has been handed to the system. A callback may call this too.
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
            raise LinkTimeout(f"the thread {thread.name!r} is stuck in a callback")

    def _supervise(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # the supervisor of this thread: whatever ends it must reach the owner
            is_first = self._ending.acquire(blocking=False)
            self._link.close()
            self._sender.stop()
            if is_first:
                self._on_error(error)
