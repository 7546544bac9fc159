"""Averaging over all rings of a node at once, over links that it shares between them.

An `Averaging` lives as long as its links; `run` makes one attempt at one round. When it returns, every ring is done or
has failed with a reason, and no thread touches the memory of any of them. Whether all members have the same result is
for them to compare (`digest`) before they use it.

    with Averaging(links) as averaging:
        parts = [Part(spec, vector, result, residual) for ...]
        outcome = averaging.run(Key(round=7, attempt=0), parts, deadline_s=60.0)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ravnest.core.config import require
from ravnest.core.errors import LinkTimeout
from ravnest.net.link import Link
from ravnest.rings.attempt import Attempt, Key, Outgoing
from ravnest.rings.errors import RingFailed
from ravnest.rings.line import AveragingConfig, Line
from ravnest.rings.part import Part
from ravnest.rings.router import Router

__all__ = ["Averaging", "Outcome"]

_JOIN_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """Rings that are done, rings that failed and why, the bytes that this node sent for them, and the time it took."""

    done: tuple[int, ...]
    failed: Mapping[int, RingFailed]
    sent_bytes: int
    seconds: float


class Averaging:
    """Owns the links, each to the peer of its name, and two threads for each."""

    def __init__(self, links: Mapping[str, Link], config: AveragingConfig | None = None) -> None:
        self._config = config or AveragingConfig()
        self._router = Router(self._post)
        self._lines = {peer: Line(peer, link, self._router, self._config) for peer, link in links.items()}

    def __enter__(self) -> Averaging:
        for line in self._lines.values():
            line.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, key: Key, parts: Sequence[Part], *, deadline_s: float) -> Outcome:
        """One attempt: returns when all rings are settled, at the latest a grace time after `deadline_s`."""
        self._check(parts)
        began_s = time.monotonic()
        attempt = self._router.open(key, parts)
        with self._router.changed:
            if not self._router.changed.wait_for(lambda: attempt.is_settled, deadline_s):
                attempt.expire(deadline_s)
        self._withdraw(attempt)
        failed = attempt.failures
        return Outcome(
            tuple(ring for ring in attempt.seats if ring not in failed),
            failed,
            sum(part.sent_bytes for part in parts),
            time.monotonic() - began_s,
        )

    def cut_short(self) -> None:
        """End the attempt that is under way, from any thread: rings that are not done have failed."""
        with self._router.changed:
            self._router.attempt.expire(0.0)
            self._router.changed.notify_all()

    def close(self) -> None:
        """End all links and threads."""
        for line in self._lines.values():
            line.close()
        if not all(line.join(_JOIN_S) for line in self._lines.values()):
            raise LinkTimeout("a thread of the averaging does not end")

    def _post(self, outgoing: Outgoing) -> None:
        line = self._lines.get(outgoing.peer)
        if line is not None:
            line.put(outgoing)

    def _check(self, parts: Sequence[Part]) -> None:
        require(len({part.spec.id for part in parts}) == len(parts), "every ring has an id of its own")
        for part in parts:
            for peer in {part.spec.before, part.spec.after} - {part.spec.me}:
                require(peer in self._lines, f"ring {part.spec.id} needs a link to {peer}, and there is none")

    def _withdraw(self, attempt: Attempt) -> None:
        """Wait until no thread is at the rings' memory; cut the links of those that do not move."""
        changed = self._router.changed
        with changed:
            if changed.wait_for(lambda: not attempt.inside, self._config.grace_s):
                return
            stuck = set(attempt.inside)
        for peer in stuck:
            self._lines[peer].close()
        with changed:
            if not changed.wait_for(lambda: not attempt.inside, _JOIN_S):
                raise LinkTimeout(f"a thread of the averaging with {', '.join(sorted(stuck))} does not end")
