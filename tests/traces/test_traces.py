"""Five hundred trainings in which anything happens at any moment: none hangs, and every batch is accounted for.

Nodes join, die, freeze, lose lines and workers, are slow, leave and come back, and the coordinator itself is killed and
started again. What must hold at every moment is checked after every event (`ledger`); that a training ends, once enough
nodes are there for long enough, by a patience that only runs on the virtual clock.
"""

from __future__ import annotations

import pytest

from tests.traces.fleet import GRACE_S, Fleet

TRACES, GROUP = 500, 25
_ROUND = 4 * 11 * GRACE_S  # four attempts, each with its grace and ten times that to finish


@pytest.mark.parametrize("first", range(0, TRACES, GROUP))
def test_nothing_is_lost_and_nothing_hangs(first: int) -> None:
    for seed in range(first, first + GROUP):
        fleet = Fleet(seed)
        fleet.run()
        told = f"seed {seed}: {fleet.faults}"
        assert fleet.ledger.done == set(range(fleet.requester.steps)), told
        assert fleet.coordinator.state.leases.counts.outstanding == 0, told
        assert fleet.ledger.longest_round_s <= _ROUND, told


def test_traces_have_something_in_them() -> None:
    """Else the property would hold of nothing."""
    fleets = [Fleet(seed) for seed in range(40)]
    for fleet in fleets:
        fleet.run()
    happened = sum((fleet.ledger.kinds for fleet in fleets), start=type(fleets[0].ledger.kinds)())
    for kind in (
        "LeaseReturned",
        "NodeBlamed",
        "NodeNotAveraged",
        "RoundCommitted",
        "CopyKept",
        "NodeGone",
        "Considered",
    ):
        assert happened[kind] >= 2, (kind, happened)


def test_a_trace_is_the_same_each_time() -> None:
    one, other = Fleet(7), Fleet(7)
    one.run()
    other.run()
    assert (one.ledger.kinds, one.loop.time()) == (other.ledger.kinds, other.loop.time())
