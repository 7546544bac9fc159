"""Batches lent to clusters, counted exactly.

Batches have the numbers 0, 1, 2, ... in the order of the data. A lease is one batch lent to one cluster once, and at
every moment

    granted = settled + repeated + outstanding + returned

holds, for all leases and for those of each cluster: a lease settles its batch, or repeats what another lease has
settled, or is out, or came back without the batch being trained. No batch is lost: every number below `next_new` is
settled, outstanding or waiting to be lent again.

Only what is not settled is remembered by number, so memory follows the leases that are out and not the length of the
training. Choosing (`grant`) changes nothing; `note_granted` applies it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal

import msgspec

__all__ = ["Counts", "Leases", "Outcome"]

Outcome = Literal["settled", "repeated", "ignored"]


class Counts(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What became of leases."""

    granted: int = 0
    settled: int = 0
    repeated: int = 0
    outstanding: int = 0
    returned: int = 0

    @property
    def is_balanced(self) -> bool:
        return self.granted == self.settled + self.repeated + self.outstanding + self.returned


class _Account(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One cluster's leases: its counts, those that are out, and those it gave back and might still settle."""

    counts: Counts = msgspec.field(default_factory=Counts)
    out: set[int] = set()
    given_back: set[int] = set()
    is_closed: bool = False


class Leases(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Which batches are where. Plain data, so that a snapshot has all of it."""

    counts: Counts = msgspec.field(default_factory=Counts)
    next_new: int = 0
    unsettled: set[int] = set()  # of the numbers below next_new
    waiting: list[int] = []  # unsettled and with nobody, in order
    accounts: dict[str, _Account] = {}

    def grant(self, cluster: str, available: int) -> int | None:
        """Which batch a cluster should get, if the data has produced `available` so far.

        Batches that came back go first, the oldest before the others; those that this very cluster gave back go to it
        only if there is no other such batch. After a restart they may have yet to be produced again.
        """
        waiting = self.waiting[: bisect_left(self.waiting, available)]
        if waiting:
            account = self.accounts.get(cluster)
            own = account.given_back if account is not None else ()
            return next((batch for batch in waiting if batch not in own), waiting[0])
        return self.next_new if self.next_new < available else None

    def note_granted(self, cluster: str, batch: int) -> None:
        assert 0 <= batch <= self.next_new, f"batch {batch} is granted before batch {self.next_new}"
        account = self.accounts.setdefault(cluster, _Account())
        assert batch not in account.out, f"cluster {cluster} has batch {batch} already"
        assert not account.is_closed, f"cluster {cluster} has ended and gets batch {batch}"
        if batch == self.next_new:
            self.next_new += 1
            self.unsettled.add(batch)
        else:
            self._no_longer_waits(batch)
        account.given_back.discard(batch)  # from now on this lease counts, not the earlier one
        account.out.add(batch)
        for counts in (self.counts, account.counts):
            counts.granted += 1
            counts.outstanding += 1

    def settle(self, cluster: str, batch: int) -> Outcome:
        """A cluster has trained a batch: for the first time, once more, or ("ignored") without having a lease for it.

        A lease that was given back may still be settled while its cluster lives: it then no longer counts as returned.
        """
        account = self.accounts.get(cluster)
        if account is None or not (batch in account.out or batch in account.given_back):
            return "ignored"
        was_out = batch in account.out
        (account.out if was_out else account.given_back).remove(batch)
        is_first = batch in self.unsettled
        if is_first:
            self.unsettled.remove(batch)
            self._no_longer_waits(batch)
        for counts in (self.counts, account.counts):
            counts.outstanding -= was_out
            counts.returned -= not was_out
            counts.settled += is_first
            counts.repeated += not is_first
        return "settled" if is_first else "repeated"

    def give_back(self, cluster: str, batch: int) -> bool:
        """A cluster does not train a batch it has; whether it had it."""
        account = self.accounts.get(cluster)
        if account is None or batch not in account.out:
            return False
        account.out.remove(batch)
        account.given_back.add(batch)
        for counts in (self.counts, account.counts):
            counts.outstanding -= 1
            counts.returned += 1
        if batch in self.unsettled and not any(batch in other.out for other in self.accounts.values()):
            insort(self.waiting, batch)
        return True

    def close(self, cluster: str) -> int:
        """A cluster ended: all it has comes back, and nothing more is heard of it. Returns how many came back."""
        account = self.accounts.get(cluster)
        if account is None:
            return 0
        batches = sorted(account.out)
        for batch in batches:
            self.give_back(cluster, batch)
        account.given_back.clear()
        account.is_closed = True
        return len(batches)

    def forget(self, cluster: str) -> None:
        """Drop the counts of a cluster that ended; they stay in the sum."""
        account = self.accounts.get(cluster)
        if account is not None:
            assert account.is_closed, f"cluster {cluster} has not ended"
            del self.accounts[cluster]

    def of(self, cluster: str) -> Counts:
        """A cluster's own counts."""
        account = self.accounts.get(cluster)
        return account.counts if account is not None else Counts()

    def outstanding_of(self, cluster: str) -> tuple[int, ...]:
        """The batches a cluster has, in order."""
        account = self.accounts.get(cluster)
        return tuple(sorted(account.out)) if account is not None else ()

    def is_settled(self, batch: int) -> bool:
        return 0 <= batch < self.next_new and batch not in self.unsettled

    @property
    def settled_below(self) -> int:
        """All batches below this number are settled: where the data would go on after a restart."""
        return min(self.unsettled, default=self.next_new)

    def _no_longer_waits(self, batch: int) -> None:
        place = bisect_left(self.waiting, batch)
        if place < len(self.waiting) and self.waiting[place] == batch:
            del self.waiting[place]
