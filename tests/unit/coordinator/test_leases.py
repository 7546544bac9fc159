"""Every batch is settled, outstanding or waiting, and every lease is counted once, in any order of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator.policy.leases import LeaseCounts, Leases

CLUSTERS = ("a", "b", "c")
moves = st.tuples(
    st.sampled_from(["grant", "grant", "twice", "settle", "settle", "return", "close"]),
    st.sampled_from(CLUSTERS),
    st.integers(0, 9),
)
traces = st.lists(moves, max_size=12) | st.lists(moves, min_size=40, max_size=120)


@dataclass
class Lease:
    """The outcome of one lease, stored forever: the simple reference implementation."""

    cluster: str
    batch: int
    outcome: str = "outstanding"
    is_replaced: bool = False  # the same cluster got the same batch again


class Reference:
    """A reference for `Leases`, with a list of all leases."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.closed: set[str] = set()

    def grant(self, cluster: str, batch: int) -> None:
        for lease in self.leases:
            if (lease.cluster, lease.batch) == (cluster, batch):
                lease.is_replaced = True
        self.leases.append(Lease(cluster, batch))

    def settle(self, cluster: str, batch: int) -> None:
        own = [x for x in self.leases if (x.cluster, x.batch) == (cluster, batch) and not x.is_replaced]
        open_ones = [x for x in own if x.outcome == "outstanding"] or [x for x in own if x.outcome == "returned"]
        if open_ones and cluster not in self.closed:
            is_first = all(x.outcome != "settled" for x in self.leases if x.batch == batch)
            open_ones[-1].outcome = "settled" if is_first else "repeated"

    def return_batches(self, cluster: str, batch: int | None = None) -> None:
        for lease in self.leases:
            if lease.cluster == cluster and lease.outcome == "outstanding" and batch in (None, lease.batch):
                lease.outcome = "returned"

    def counts(self, cluster: str | None = None) -> LeaseCounts:
        outcomes = Counter(x.outcome for x in self.leases if cluster in (None, x.cluster))
        return LeaseCounts(granted=outcomes.total(), **outcomes)

    def batches(self, outcome: str) -> set[int]:
        return {x.batch for x in self.leases if x.outcome == outcome}


def follow(leases: Leases, reference: Reference, move: str, cluster: str, number: int) -> None:
    if move in ("grant", "twice") and cluster not in reference.closed:
        batch = leases.next_batch(cluster, 40)
        if move == "twice" and leases.unsettled:  # another cluster has it too
            batch = sorted(leases.unsettled)[number % len(leases.unsettled)]
        if batch is not None and batch not in leases.outstanding_of(cluster):
            leases.grant(cluster, batch)
            reference.grant(cluster, batch)
    elif move == "settle":
        leases.settle(cluster, number)
        reference.settle(cluster, number)
    elif move == "return":
        leases.return_batch(cluster, number)
        reference.return_batches(cluster, number)
    elif move == "close" and number == 0:
        leases.close(cluster)
        reference.return_batches(cluster)
        if leases.counts_of(cluster).granted:
            reference.closed.add(cluster)


@settings(deadline=None)
@given(traces)
def test_counts_equal_the_reference(trace: list[tuple[str, str, int]]) -> None:
    leases, reference = Leases(), Reference()
    for move, cluster, number in trace:
        follow(leases, reference, move, cluster, number)
        assert leases.counts == reference.counts()
        for name in CLUSTERS:
            assert leases.counts_of(name) == reference.counts(name)
            assert leases.counts_of(name).is_balanced
        assert leases.counts.is_balanced


@settings(deadline=None)
@given(traces)
def test_no_batch_is_ever_lost(trace: list[tuple[str, str, int]]) -> None:
    leases, reference = Leases(), Reference()
    for move, cluster, number in trace:
        follow(leases, reference, move, cluster, number)
        settled, out = reference.batches("settled"), reference.batches("outstanding")
        assert set(range(leases.next_new)) == settled | out | set(leases.waiting)
        assert {n for n in range(leases.next_new) if leases.is_settled(n)} == settled
        assert not set(leases.waiting) & (settled | out)
        assert leases.waiting == sorted(leases.waiting)
        assert all(n in settled for n in range(leases.settled_below))
        assert leases.settled_below not in settled


@settings(deadline=None)
@given(traces)
def test_remaining_batches_can_always_be_trained(trace: list[tuple[str, str, int]]) -> None:
    leases, reference = Leases(), Reference()
    for move, cluster, number in trace:
        follow(leases, reference, move, cluster, number)
    for cluster in CLUSTERS:
        leases.close(cluster)
    while (batch := leases.next_batch("last", 40)) is not None:
        leases.grant("last", batch)
        assert leases.settle("last", batch) == "settled"
    assert leases.counts.settled == leases.settled_below == 40


def test_returned_batches_go_first_and_new_ones_wait_for_the_data() -> None:
    leases = Leases()
    assert leases.next_batch("a", 0) is None
    for batch in range(3):
        assert leases.next_batch("a", 3) == batch
        leases.grant("a", batch)
    assert leases.next_batch("a", 3) is None
    assert leases.close("a") == 3
    assert leases.outstanding_of("a") == ()
    assert leases.next_batch("b", 100) == 0


def test_a_cluster_gets_its_returned_batch_only_if_no_other_waits() -> None:
    leases = Leases()
    for batch, cluster in enumerate("aab"):
        leases.grant(cluster, batch)
    leases.return_batch("a", 0)
    leases.return_batch("b", 2)
    assert leases.next_batch("a", 10) == 2
    assert leases.next_batch("b", 10) == 0
    leases.grant("b", 0)
    assert leases.next_batch("b", 10) == 2


def test_a_batch_that_two_clusters_train_is_settled_once_and_repeated_once() -> None:
    leases = Leases()
    leases.grant("slow", 0)
    leases.return_batch("slow", 0)
    leases.grant("fast", 0)
    assert leases.settle("slow", 0) == "settled"  # late, and before the other
    assert leases.settle("slow", 0) == "ignored"
    assert leases.settle("fast", 0) == "repeated"
    assert leases.counts == LeaseCounts(granted=2, settled=1, repeated=1)


def test_a_batch_returned_and_leased_again_is_settled_once() -> None:
    leases = Leases()
    for _ in range(2):
        leases.grant("a", 0)
        leases.return_batch("a", 0)
    leases.grant("a", 0)
    assert leases.settle("a", 0) == "settled"
    assert leases.settle("a", 0) == "ignored"
    assert leases.counts == LeaseCounts(granted=3, settled=1, returned=2)


def test_a_cluster_that_ended_settles_nothing() -> None:
    leases = Leases()
    leases.grant("a", 0)
    leases.close("a")
    assert leases.settle("a", 0) == "ignored"
    assert leases.settle("unknown", 0) == "ignored"
    assert leases.counts == LeaseCounts(granted=1, returned=1)
    leases.forget("a")
    assert leases.counts == LeaseCounts(granted=1, returned=1)
    assert leases.counts_of("a") == LeaseCounts()


def test_memory_is_proportional_to_outstanding_leases() -> None:
    leases = Leases()
    leases.grant("slow", 0)
    for batch in range(1, 10_001):
        leases.grant("fast", batch)
        leases.settle("fast", batch)
    assert leases.unsettled == {0}
    assert leases.settled_below == 0
    assert not leases.waiting
    assert sum(len(account.outstanding) + len(account.returned) for account in leases.accounts.values()) == 1
