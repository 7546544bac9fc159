"""Leases of batches to clusters, counted exactly.

Batches are numbered 0, 1, 2, ... in the order of the data. A lease is one batch given to one cluster once, and at any
time, over all leases and over those of each cluster,

    granted = settled + repeated + outstanding + returned

A lease settles its batch, repeats a batch that another lease has settled, is outstanding, or is returned untrained. No
batch is lost: every number below `next_new` is settled, outstanding or waiting to be leased again.

Only unsettled batches are stored by number, so memory is proportional to the outstanding leases and not to the length
of the run. Choosing a batch (`next_batch`) changes nothing; `grant` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal

import msgspec

__all__ = ["LeaseCounts", "Leases"]

Outcome = Literal["settled", "repeated", "ignored"]


class LeaseCounts(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Leases by outcome."""

    granted: int = 0
    settled: int = 0
    repeated: int = 0
    outstanding: int = 0
    returned: int = 0

    @property
    def is_balanced(self) -> bool:
        return self.granted == self.settled + self.repeated + self.outstanding + self.returned


class _Account(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Leases of one cluster: counts, outstanding batches, and returned batches that it may still settle."""

    counts: LeaseCounts = msgspec.field(default_factory=LeaseCounts)
    outstanding: set[int] = set()
    returned: set[int] = set()
    is_closed: bool = False


class Leases(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """All leases. Plain data, so that a snapshot contains it."""

    counts: LeaseCounts = msgspec.field(default_factory=LeaseCounts)
    next_new: int = 0
    unsettled: set[int] = set()  # of the numbers below next_new
    waiting: list[int] = []  # unsettled and not leased, in order
    accounts: dict[str, _Account] = {}

    def next_batch(self, cluster: str, available: int) -> int | None:
        """The batch to lease to a cluster, given that the data loader has produced `available` batches.

        Returned batches go first, in order; a batch that this cluster returned goes to it only if no other one waits.
        After a restart a returned batch may not have been produced again yet.
        """
        waiting = self.waiting[: bisect_left(self.waiting, available)]
        if waiting:
            account = self.accounts.get(cluster)
            own = account.returned if account is not None else ()
            return next((batch for batch in waiting if batch not in own), waiting[0])
        return self.next_new if self.next_new < available else None

    def grant(self, cluster: str, batch: int) -> None:
        assert 0 <= batch <= self.next_new, f"batch {batch} granted before batch {self.next_new}"
        account = self.accounts.setdefault(cluster, _Account())
        assert batch not in account.outstanding, f"cluster {cluster} already has batch {batch}"
        assert not account.is_closed, f"batch {batch} granted to cluster {cluster}, which has ended"
        if batch == self.next_new:
            self.next_new += 1
            self.unsettled.add(batch)
        else:
            self._remove_waiting(batch)
        account.returned.discard(batch)  # the new lease replaces the returned one
        account.outstanding.add(batch)
        for counts in (self.counts, account.counts):
            counts.granted += 1
            counts.outstanding += 1

    def settle(self, cluster: str, batch: int) -> Outcome:
        """Count a trained batch: settled, repeated if another lease settled it, or ignored without a lease.

        A returned lease may still be settled while its cluster exists; it then no longer counts as returned.
        """
        account = self.accounts.get(cluster)
        if account is None or not (batch in account.outstanding or batch in account.returned):
            return "ignored"
        was_outstanding = batch in account.outstanding
        (account.outstanding if was_outstanding else account.returned).remove(batch)
        is_first = batch in self.unsettled
        if is_first:
            self.unsettled.remove(batch)
            self._remove_waiting(batch)
        for counts in (self.counts, account.counts):
            counts.outstanding -= was_outstanding
            counts.returned -= not was_outstanding
            counts.settled += is_first
            counts.repeated += not is_first
        return "settled" if is_first else "repeated"

    def return_batch(self, cluster: str, batch: int) -> bool:
        """Take an untrained batch back from a cluster; returns whether the cluster had it."""
        account = self.accounts.get(cluster)
        if account is None or batch not in account.outstanding:
            return False
        account.outstanding.remove(batch)
        account.returned.add(batch)
        for counts in (self.counts, account.counts):
            counts.outstanding -= 1
            counts.returned += 1
        if batch in self.unsettled and not any(batch in other.outstanding for other in self.accounts.values()):
            insort(self.waiting, batch)
        return True

    def close(self, cluster: str) -> int:
        """Take all outstanding batches back from a cluster that ended; returns their number."""
        account = self.accounts.get(cluster)
        if account is None:
            return 0
        batches = sorted(account.outstanding)
        for batch in batches:
            self.return_batch(cluster, batch)
        account.returned.clear()
        account.is_closed = True
        return len(batches)

    def forget(self, cluster: str) -> None:
        """Drop the counts of a cluster that ended; the totals keep them."""
        account = self.accounts.get(cluster)
        if account is not None:
            assert account.is_closed, f"cluster {cluster} has not ended"
            del self.accounts[cluster]

    def counts_of(self, cluster: str) -> LeaseCounts:
        """Counts of one cluster."""
        account = self.accounts.get(cluster)
        return account.counts if account is not None else LeaseCounts()

    def outstanding_of(self, cluster: str) -> tuple[int, ...]:
        """Outstanding batches of a cluster, in order."""
        account = self.accounts.get(cluster)
        return tuple(sorted(account.outstanding)) if account is not None else ()

    def is_settled(self, batch: int) -> bool:
        return 0 <= batch < self.next_new and batch not in self.unsettled

    @property
    def settled_below(self) -> int:
        """All batches below this number are settled: data resumes here after a restart."""
        return min(self.unsettled, default=self.next_new)

    def _remove_waiting(self, batch: int) -> None:
        place = bisect_left(self.waiting, batch)
        if place < len(self.waiting) and self.waiting[place] == batch:
            del self.waiting[place]
