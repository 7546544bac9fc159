"""Hundreds of runs with random faults: none hangs, and every batch is accounted for.

Nodes join, die, freeze, lose links and workers, are slow, leave and come back, and the coordinator is killed and
restarted. Invariants are checked after every event (`ledger`); a timeout on the virtual clock checks that a run ends
once enough nodes are available.
"""

from __future__ import annotations

import pytest

from tests.sampling import every
from tests.simulation.fleet import GRACE_S, Fleet

TRACES, GROUP = 500, 25
_ROUND = 4 * 11 * GRACE_S  # four attempts, each with its grace and ten times that to finish


@pytest.mark.parametrize("first", every(2, range(0, TRACES, GROUP)))
def test_no_batch_is_lost_and_no_run_hangs(first: int) -> None:
    for seed in range(first, first + GROUP):
        fleet = Fleet(seed)
        fleet.run()
        trace = f"seed {seed}: {fleet.faults}"
        assert fleet.ledger.done == set(range(fleet.requester.steps)), trace
        assert fleet.coordinator.state.leases.counts.outstanding == 0, trace
        assert fleet.ledger.longest_round_s <= _ROUND, trace


def test_traces_contain_faults() -> None:
    """Else the property would hold trivially."""
    fleets = [Fleet(seed) for seed in range(80)]
    for fleet in fleets:
        fleet.run()
    counts = sum((fleet.ledger.kinds for fleet in fleets), start=type(fleets[0].ledger.kinds)())
    for kind in (
        "LeaseReturned",
        "NodeQuarantined",
        "NodeAveragingFailed",
        "RoundCommitted",
        "ReplicaRecorded",
        "NodeLost",
        "ReplanConsidered",
    ):
        assert counts[kind] >= 2, (kind, counts)


def test_a_trace_is_the_same_each_time() -> None:
    one, other = Fleet(7), Fleet(7)
    one.run()
    other.run()
    assert (one.ledger.kinds, one.loop.time()) == (other.ledger.kinds, other.loop.time())
