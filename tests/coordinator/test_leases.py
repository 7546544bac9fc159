"""Every batch is settled, out or waiting, and every lease is counted exactly once, whatever happens in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator.leases import Counts, Leases

CLUSTERS = ("a", "b", "c")
moves = st.tuples(
    st.sampled_from(["grant", "grant", "twice", "settle", "settle", "give back", "close"]),
    st.sampled_from(CLUSTERS),
    st.integers(0, 9),
)
traces = st.lists(moves, max_size=12) | st.lists(moves, min_size=40, max_size=120)


@dataclass
class Lease:
    """What became of one lease, remembered for ever: the slow and plain way to count."""

    cluster: str
    batch: int
    fate: str = "outstanding"
    is_replaced: bool = False  # the same cluster got the same batch again


class Plain:
    """The same as `Leases`, with a list of all leases there ever were."""

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
        open_ones = [x for x in own if x.fate == "outstanding"] or [x for x in own if x.fate == "returned"]
        if open_ones and cluster not in self.closed:
            is_first = all(x.fate != "settled" for x in self.leases if x.batch == batch)
            open_ones[-1].fate = "settled" if is_first else "repeated"

    def give_back(self, cluster: str, batch: int | None = None) -> None:
        for lease in self.leases:
            if lease.cluster == cluster and lease.fate == "outstanding" and batch in (None, lease.batch):
                lease.fate = "returned"

    def counts(self, cluster: str | None = None) -> Counts:
        fates = Counter(x.fate for x in self.leases if cluster in (None, x.cluster))
        return Counts(granted=fates.total(), **fates)

    def batches(self, fate: str) -> set[int]:
        return {x.batch for x in self.leases if x.fate == fate}


def follow(leases: Leases, plain: Plain, move: str, cluster: str, number: int) -> None:
    if move in ("grant", "twice") and cluster not in plain.closed:
        batch = leases.grant(cluster, 40)
        if move == "twice" and leases.unsettled:  # somebody else has it too
            batch = sorted(leases.unsettled)[number % len(leases.unsettled)]
        if batch is not None and batch not in leases.outstanding_of(cluster):
            leases.note_granted(cluster, batch)
            plain.grant(cluster, batch)
    elif move == "settle":
        leases.settle(cluster, number)
        plain.settle(cluster, number)
    elif move == "give back":
        leases.give_back(cluster, number)
        plain.give_back(cluster, number)
    elif move == "close" and number == 0:
        leases.close(cluster)
        plain.give_back(cluster)
        if leases.of(cluster).granted:
            plain.closed.add(cluster)


@settings(deadline=None)
@given(traces)
def test_counts_are_those_of_the_plain_way(trace: list[tuple[str, str, int]]) -> None:
    leases, plain = Leases(), Plain()
    for move, cluster, number in trace:
        follow(leases, plain, move, cluster, number)
        assert leases.counts == plain.counts()
        for name in CLUSTERS:
            assert leases.of(name) == plain.counts(name)
            assert leases.of(name).is_balanced
        assert leases.counts.is_balanced


@settings(deadline=None)
@given(traces)
def test_no_batch_is_ever_lost(trace: list[tuple[str, str, int]]) -> None:
    leases, plain = Leases(), Plain()
    for move, cluster, number in trace:
        follow(leases, plain, move, cluster, number)
        settled, out = plain.batches("settled"), plain.batches("outstanding")
        assert set(range(leases.next_new)) == settled | out | set(leases.waiting)
        assert {n for n in range(leases.next_new) if leases.is_settled(n)} == settled
        assert not set(leases.waiting) & (settled | out)
        assert leases.waiting == sorted(leases.waiting)
        assert all(n in settled for n in range(leases.settled_below))
        assert leases.settled_below not in settled


@settings(deadline=None)
@given(traces)
def test_what_is_left_can_always_be_trained(trace: list[tuple[str, str, int]]) -> None:
    leases, plain = Leases(), Plain()
    for move, cluster, number in trace:
        follow(leases, plain, move, cluster, number)
    for cluster in CLUSTERS:
        leases.close(cluster)
    while (batch := leases.grant("last", 40)) is not None:
        leases.note_granted("last", batch)
        assert leases.settle("last", batch) == "settled"
    assert leases.counts.settled == leases.settled_below == 40


def test_what_came_back_goes_first_and_new_ones_wait_for_the_data() -> None:
    leases = Leases()
    assert leases.grant("a", 0) is None
    for batch in range(3):
        assert leases.grant("a", 3) == batch
        leases.note_granted("a", batch)
    assert leases.grant("a", 3) is None
    assert leases.close("a") == 3
    assert leases.outstanding_of("a") == ()
    assert leases.grant("b", 100) == 0


def test_a_batch_goes_back_to_who_gave_it_back_only_if_there_is_no_other() -> None:
    leases = Leases()
    for batch, cluster in enumerate("aab"):
        leases.note_granted(cluster, batch)
    leases.give_back("a", 0)
    leases.give_back("b", 2)
    assert leases.grant("a", 10) == 2
    assert leases.grant("b", 10) == 0
    leases.note_granted("b", 0)
    assert leases.grant("b", 10) == 2


def test_a_batch_that_two_clusters_train_is_settled_once_and_repeated_once() -> None:
    leases = Leases()
    leases.note_granted("slow", 0)
    leases.give_back("slow", 0)
    leases.note_granted("fast", 0)
    assert leases.settle("slow", 0) == "settled"  # late, and before the other
    assert leases.settle("slow", 0) == "ignored"
    assert leases.settle("fast", 0) == "repeated"
    assert leases.counts == Counts(granted=2, settled=1, repeated=1)


def test_a_batch_that_a_cluster_gave_back_and_got_again_is_settled_once() -> None:
    leases = Leases()
    for _ in range(2):
        leases.note_granted("a", 0)
        leases.give_back("a", 0)
    leases.note_granted("a", 0)
    assert leases.settle("a", 0) == "settled"
    assert leases.settle("a", 0) == "ignored"
    assert leases.counts == Counts(granted=3, settled=1, returned=2)


def test_a_cluster_that_ended_settles_nothing() -> None:
    leases = Leases()
    leases.note_granted("a", 0)
    leases.close("a")
    assert leases.settle("a", 0) == "ignored"
    assert leases.settle("nobody", 0) == "ignored"
    assert leases.counts == Counts(granted=1, returned=1)
    leases.forget("a")
    assert leases.counts == Counts(granted=1, returned=1)
    assert leases.of("a") == Counts()


def test_memory_follows_what_is_out_and_not_what_was_trained() -> None:
    leases = Leases()
    leases.note_granted("slow", 0)
    for batch in range(1, 10_001):
        leases.note_granted("fast", batch)
        leases.settle("fast", batch)
    assert leases.unsettled == {0}
    assert leases.settled_below == 0
    assert not leases.waiting
    assert sum(len(account.out) + len(account.given_back) for account in leases.accounts.values()) == 1
