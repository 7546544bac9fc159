"""Limits of the coordinator's server: timeouts, rates of requests, and how often rejected connections are logged.

Rejections are aggregated into one event per address and reason, so that clients cannot flood the log.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import fields
from math import inf

from ravnest.coordinator.events import ConnectionRejected
from ravnest.core.config import config, require
from ravnest.transport.address import home_of

__all__ = ["HttpTimeouts", "RejectionLog", "RequestRates", "TokenBucket"]


@config
class HttpTimeouts:
    """Timeouts in seconds. `body_s` applies to each chunk of a body, not to the whole."""

    request_s: float = 20.0  # first request after the handshake
    hello_s: float = 15.0  # first message of a node's session or feed
    body_s: float = 30.0
    send_s: float = 20.0  # one message to a node
    goodbye_s: float = 2.0
    reconnect_s: float = 3.0  # for interrupted nodes to come back at the end of the run, and be told of it
    rejection_log_s: float = 5.0  # between two events of rejected connections

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            require(0 < value < inf, f"{each.name} must be > 0, got {value}")


_MAX_KINDS = 8  # of address and reason, between two events


class RejectionLog:
    """Aggregates rejections; calls `record` with an event per address and reason, at most every `every_s`.

    Runs in an asyncio loop.
    """

    def __init__(
        self, record: Callable[[ConnectionRejected], None], now_s: Callable[[], float], every_s: float
    ) -> None:
        self._record, self._now_s, self._every_s = record, now_s, every_s
        self._counts: Counter[tuple[str, str]] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._flushed_s = 0.0

    def add(self, address: str, reason: str) -> None:
        key = (address.rpartition(":")[0] or address, reason)
        if key not in self._counts and len(self._counts) >= _MAX_KINDS:
            key = ("many addresses", "various reasons")
        self._counts[key] += 1
        if self._timer is None:
            wait_s = max(self._flushed_s + self._every_s - self._now_s(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._flushed_s = None, self._now_s()
        counts, self._counts = self._counts, Counter()
        for (address, reason), count in counts.items():
            self._record(ConnectionRejected(self._now_s(), address, reason, count))


class TokenBucket:
    """Admits `per_s` requests a second, and `burst` at once after a pause. Times are those of any one clock."""

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at_s = burst, now_s

    def take(self, now_s: float) -> bool:
        """Admit a request, or return False."""
        self._fill(now_s)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def wait_s(self, now_s: float) -> float:
        """Return the time until the next request is admitted."""
        self._fill(now_s)
        return max(1 - self._left, 0.0) / self._per_s

    def _fill(self, now_s: float) -> None:
        self._left = min(self._burst, self._left + max(now_s - self._at_s, 0.0) * self._per_s)
        self._at_s = now_s


_MAX_NETWORKS = 256


class RequestRates:
    """A bucket for each network, so that a flood from one leaves the requests of others alone, and one for all."""

    def __init__(self, per_s: float, burst: float, now_s: Callable[[], float], *, share: float = 0.25) -> None:
        self._per_s, self._burst, self._now_s = share * per_s, share * burst, now_s
        self._all = TokenBucket(per_s, burst, now_s())
        self._of: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, host: str) -> bool:
        """Admit a request from this host, or return False."""
        now_s, network = self._now_s(), home_of(host) if host else ""
        bucket = self._of.get(network)
        if bucket is None:
            bucket = self._of[network] = TokenBucket(self._per_s, self._burst, now_s)
            if len(self._of) > _MAX_NETWORKS:
                self._of.popitem(last=False)
        self._of.move_to_end(network)
        return bucket.take(now_s) and self._all.take(now_s)
