"""A waiting node is told why it waits and for how long at most, once per change."""

from __future__ import annotations

from pathlib import Path

from ravnest.coordinator import events as on
from ravnest.coordinator.apply import apply
from ravnest.coordinator.notices import wait_of
from ravnest.coordinator.policy.membership import MembershipPolicy, plan_wait
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import Waiting
from tests.unit.coordinator.attacks import run, running_coordinator
from tests.unit.coordinator.clients import FakeNode
from tests.unit.coordinator.histories import cluster, connected, planned, state_of

POLICY = MembershipPolicy(min_nodes=3, settle_s=5.0)


def wait(state: CoordinatorState, name: str, now_s: float) -> tuple[str, float | None] | None:
    return wait_of(state, name, now_s, POLICY, plan_wait(state, now_s, POLICY))


def test_each_wait_has_a_reason() -> None:
    state = state_of([on.RunStarted(0.0, "r", None, "1"), connected(10.0, "attic")])
    assert wait(state, "attic", 11.0) == ("waits for 2 more nodes", None)
    apply(state, connected(12.0, "barn"))
    assert wait(state, "attic", 13.0) == ("waits for 1 more node", None)
    apply(state, connected(14.0, "den"))
    assert wait(state, "attic", 15.0) == ("waits for more nodes: training begins", 19.0)
    assert wait(state, "attic", 19.0) == ("waits for the plan that is being computed", None)
    apply(state, on.NodeEnrolled(15.0, "eaves", "key", ""))
    assert wait(state, "attic", 15.0) == ("waits for 1 more node: training begins", 34.0)
    apply(state, planned(19.0, cluster(1, "attic", "barn"), idle=["den"]))
    assert wait(state, "attic", 20.0) is None, "it loads its stage"
    assert wait(state, "den", 20.0) == ("it would slow all", None)
    apply(state, on.NodeReady(21.0, "c1", "attic"))
    assert wait(state, "attic", 21.0) == ("waits until barn is ready", None)
    apply(state, on.NodeReady(22.0, "c1", "barn"))
    assert wait(state, "attic", 22.0) is None, "it trains"
    apply(state, on.NodeLeaving(30.0, "attic", "its owner ended it"))
    assert wait(state, "attic", 30.0) == ("others take over its stage", 35.0)
    apply(state, on.NodeLeaving(30.5, "barn", "its owner ended it"))
    assert wait(state, "attic", 30.5) is None, "nobody can take over"
    apply(state, on.NodeQuarantined(31.0, "den", "its worker died"))
    assert wait(state, "den", 31.0) == ("in quarantine (its worker died): used again", 33.0)


def test_a_node_is_told_once_and_again_when_it_reconnects(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_coordinator(tmp_path, membership=MembershipPolicy(min_nodes=2, heartbeat_s=1.0)) as server:
            async with await server.node("ann") as ann:
                assert await ann.receive(Waiting) == Waiting("waits for 1 more node")
            async with FakeNode(ann.identity, server.address) as again:
                assert await again.receive(Waiting) == Waiting("waits for 1 more node")
                async with await server.node("bob") as bob:
                    told = await bob.receive(Waiting, lambda message: message.within_s is not None)
                    assert told.reason == "waits for more nodes: training begins"
                    assert told.within_s is not None
                    assert 0 < told.within_s <= 5.0

    run(test())
