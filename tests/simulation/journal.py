"""The events that a killed coordinator restores: all but the leases that were not written yet."""

from __future__ import annotations

from ravnest.coordinator.events import ConnectionRejected, Event, LeaseGranted, LeaseSettled

_FLUSH_S = 0.25
_LATER = (LeaseGranted, LeaseSettled, ConnectionRejected)


class Journal:
    """Like that of `coordinator.service`: any event but a lease is on disk at once, with all before it."""

    def __init__(self) -> None:
        self._events: list[tuple[float, Event]] = []
        self._written = 0

    def add(self, event: Event, now_s: float) -> None:
        self._events.append((now_s, event))
        if not isinstance(event, _LATER):
            self._written = len(self._events)

    def truncate(self) -> list[Event]:
        """The events on disk after a kill."""
        flushed = [at_s for at_s, _ in self._events if at_s < self._events[-1][0] - _FLUSH_S]
        self._written = max(self._written, len(flushed))
        del self._events[self._written :]
        return [event for _, event in self._events]
