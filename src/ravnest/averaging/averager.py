"""Runs all rings of a node at once, over links that they share.

An `Averager` lives as long as its links; `run` makes one attempt at one round. When it returns, every ring is done or
has failed with a reason, and no thread accesses their memory. The members must compare the `digest` of their results
before they use them.

    with Averager(links) as averager:
        contributions = [Contribution(spec, vector, result, residual) for ...]
        outcome = averager.run(AttemptKey(round=7, attempt=0), contributions, deadline_s=60.0)
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ravnest.averaging.contribution import Contribution
from ravnest.averaging.peer_link import PeerLink, PeerLinkConfig
from ravnest.averaging.session import AttemptKey, AttemptRouter, Outgoing, RoundAttempt
from ravnest.core.config import require
from ravnest.errors import LinkTimeout, RingFailed
from ravnest.transport.link import Link

__all__ = ["Averager", "RoundOutcome"]

_JOIN_S = 10.0


@dataclass(frozen=True)
class RoundOutcome:
    """The rings that are done, the failures of the others, the bytes that this node sent, and the duration."""

    done: tuple[int, ...]
    failed: Mapping[int, RingFailed]
    sent_bytes: int
    seconds: float


class Averager:
    """Owns the links, by peer name, and two threads for each."""

    def __init__(self, links: Mapping[str, Link], config: PeerLinkConfig | None = None) -> None:
        self._config = config or PeerLinkConfig()
        self._router = AttemptRouter(self._post)
        self._links = {peer: PeerLink(peer, link, self._router, self._config) for peer, link in links.items()}

    def __enter__(self) -> Averager:
        for link in self._links.values():
            link.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, key: AttemptKey, contributions: Sequence[Contribution], *, deadline_s: float) -> RoundOutcome:
        """Make one attempt; returns when all rings are settled, at the latest `grace_s` after `deadline_s`."""
        self._check(contributions)
        start_s = time.monotonic()
        attempt = self._router.open(key, contributions)
        with self._router.changed:
            if not self._router.changed.wait_for(lambda: attempt.is_settled, deadline_s):
                attempt.expire(deadline_s)
        self._wait_for_threads(attempt)
        failed = attempt.failures
        return RoundOutcome(
            tuple(ring for ring in attempt.memberships if ring not in failed),
            failed,
            sum(contribution.sent_bytes for contribution in contributions),
            time.monotonic() - start_s,
        )

    def abort(self) -> None:
        """End the current attempt, from any thread: rings that are not done fail."""
        with self._router.changed:
            self._router.attempt.expire(0.0)
            self._router.changed.notify_all()

    def close(self) -> None:
        """Close all links and end their threads."""
        for link in self._links.values():
            link.close()
        if not all(link.join(_JOIN_S) for link in self._links.values()):
            raise LinkTimeout(f"a thread of the averager did not end within {_JOIN_S:g} s")

    def _post(self, outgoing: Outgoing) -> None:
        link = self._links.get(outgoing.peer)
        if link is not None:
            link.put(outgoing)

    def _check(self, contributions: Sequence[Contribution]) -> None:
        specs = [contribution.spec for contribution in contributions]
        ids = [spec.id for spec in specs]
        require(len(set(ids)) == len(ids), f"ring ids must be distinct, got {ids}")
        for spec in specs:
            for peer in {spec.before, spec.after} - {spec.me}:
                require(peer in self._links, f"ring {spec.id} needs a link to {peer}")

    def _wait_for_threads(self, attempt: RoundAttempt) -> None:
        """Wait until no thread accesses the rings' memory; close the links of threads that do not finish."""
        changed = self._router.changed
        with changed:
            if changed.wait_for(lambda: not attempt.users, self._config.grace_s):
                return
            stuck = set(attempt.users)
        for peer in stuck:
            self._links[peer].close()
        with changed:
            if not changed.wait_for(lambda: not attempt.users, _JOIN_S):
                raise LinkTimeout(
                    f"the threads of the links to {', '.join(sorted(stuck))} did not end within {_JOIN_S:g} s"
                )
