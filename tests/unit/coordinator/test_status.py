"""The status of any state is valid JSON that can be decoded again."""

from __future__ import annotations

from math import inf, nan

import msgspec
from hypothesis import given, settings

from ravnest.coordinator import events as on
from ravnest.coordinator.apply import apply
from ravnest.coordinator.policy.membership import MembershipPolicy
from ravnest.coordinator.state import CoordinatorState
from ravnest.coordinator.status import RunStatus, RuntimeStatus, status_of
from ravnest.core.metrics import StageMetrics
from ravnest.protocol.commands import AverageReady
from ravnest.transport.p2p.relay_server import PairStats
from tests.unit.coordinator.histories import cluster, connected, history, numbers, planned, state_of


def through_json(status: RunStatus) -> RunStatus:
    return msgspec.json.decode(msgspec.json.encode(status), type=RunStatus)


@settings(deadline=None)
@given(numbers)
def test_any_state_has_a_status_that_reads_back(moves: list[tuple[int, int]]) -> None:
    events = history(moves)
    state = state_of(events)
    status = status_of(state, events[-1].at_s, RuntimeStatus())
    assert through_json(status) == status
    assert b"secret" not in msgspec.json.encode(status)
    assert {node.name for node in status.nodes} == state.members.keys() | state.nodes.keys()
    for node in status.nodes:
        assert node.state in ("free", "forming", "training", "quarantined", "gone", "kicked", "enrolled")
        assert node.reason
        assert (node.stage is None) == (node.cluster is None)
    for found in status.clusters:
        members = {node.name for node in status.nodes if node.cluster == found.id}
        assert members == ({stage.name for stage in found.stages} if found.phase in ("forming", "training") else set())
    counted = status.leases
    assert counted.granted == counted.settled + counted.repeated + counted.outstanding + counted.returned
    assert status.steps_done == counted.settled


def run() -> CoordinatorState:
    return state_of([
        on.RunStarted(100.0, "r", 5, "1.2"), on.NodeEnrolled(100.0, "attic", "key", "t"), connected(101.0, "attic"),
        connected(101.0, "barn"), planned(102.0, cluster(1, "barn", "attic")), on.NodeReady(103.0, "c1", "attic"),
        on.LinkEstablished(103.0, "c1", "attic", "barn", "relayed", "a NAT\x1b[2J", "open a port"),
        on.NodeReady(104.0, "c1", "barn"), on.LeaseGranted(105.0, "c1", 0), on.LeaseSettled(106.0, "c1", 0),
        on.LeaseGranted(106.0, "c1", 1),
    ])  # fmt: skip


def test_nodes_and_clusters_have_their_activity() -> None:
    state = run()
    state.mark_seen("attic", 108.0, "training\nhard")
    metrics = StageMetrics(
        stage=1, updates=7, idle_s=1.0, steady_busy_s=3.0, memory_bytes=10, sent_bytes=20, received_bytes=30
    )
    runtime = RuntimeStatus(
        metrics={("c1", 1): metrics},
        losses={"c1": 2.5},
        samples_per_s={"c1": 8.0},
        relay=[PairStats(("attic", "barn"), (3, 4), 1, True)],
    )
    status = status_of(state, 110.0, runtime)
    assert (status.run, status.release, status.uptime_s, status.generation) == ("r", "1.2", 10.0, 1)
    assert (status.steps_done, status.steps) == (1, 5)
    attic = status.nodes[0]
    assert (attic.name, attic.state, attic.cluster, attic.stage) == ("attic", "training", "c1", 1)
    assert (attic.activity, attic.last_seen_age_s) == ("training hard", 2.0)
    assert [(link.peer, link.kind, link.reason) for link in attic.links] == [("barn", "relayed", "a NAT [2J")]
    found = status.clusters[0]
    assert (found.phase, found.planned_samples_per_s, found.samples_per_s, found.loss) == ("training", 10.0, 8.0, 2.5)
    assert [stage.name for stage in found.stages] == ["barn", "attic"]
    assert (found.stages[1].updates, found.stages[1].bubble, found.stages[1].sent_bytes) == (7, 0.25, 20)
    assert (found.leases.granted, found.leases.settled, found.leases.outstanding) == (2, 1, 1)
    assert (status.relay[0].names, status.relay[0].carried_bytes) == (("attic", "barn"), 7)
    assert status.events[-1].text == "cluster c1 is training: all 2 members are ready"


def test_an_idle_node_has_a_reason() -> None:
    state = run()
    apply(state, on.NodeQuarantined(110.0, "attic", "it ran out of memory"))
    apply(state, on.NodeLost(111.0, "barn", "its connection failed", is_voluntary=False))
    apply(state, on.ClusterEnded(111.0, "c1", "barn is gone", is_lost=True))
    attic, barn = status_of(state, 120.0, RuntimeStatus()).nodes
    assert attic.state == "quarantined"
    assert attic.reason == "for another 290 s unless the run needs it: it ran out of memory"
    assert (barn.state, barn.reason) == ("gone", "its connection failed")
    attic = status_of(state, 120.0, RuntimeStatus(policy=MembershipPolicy(quarantine_s=5.0))).nodes[0]
    assert (attic.state, attic.reason) == ("free", "cluster c1 ended: barn is gone")
    apply(state, on.NodeKicked(130.0, "attic", "it lied"))
    attic = status_of(state, 131.0, RuntimeStatus()).nodes[0]
    assert (attic.state, attic.reason) == ("kicked", "it lied")


def test_invalid_metrics_of_a_node_leave_the_status_valid() -> None:
    runtime = RuntimeStatus(metrics={("c1", 0): StageMetrics(idle_s=inf, steady_busy_s=nan)}, losses={"c1": nan})
    status = through_json(status_of(run(), 110.0, runtime))
    assert status.clusters[0].loss is None
    assert status.clusters[0].stages[0].bubble == 0.0


def test_rejections_and_events_are_limited() -> None:
    state = run()
    for number in range(300):
        apply(state, on.ConnectionRejected(120.0, "198.51.100.7", f"wrong token {number}", 3))
    status = status_of(state, 121.0, RuntimeStatus())
    assert status.num_rejected == 900
    assert len(status.rejections) == 50
    assert status.rejections[-1].reason == "wrong token 299"
    assert len(status.events) == 100
    assert status.events[-1].text == "rejected 198.51.100.7 3 times: wrong token 299"


def test_status_of_an_empty_state() -> None:
    status = through_json(status_of(CoordinatorState(), 100.0, RuntimeStatus()))
    assert (status.run, status.uptime_s, status.nodes, status.clusters) == ("", 0.0, (), ())


def test_the_last_round_is_reported_by_cluster() -> None:
    def report(number: int, sent: int, saved: int, error: float) -> AverageReady:
        return AverageReady(
            round=number, attempt=0, digests={}, seconds=2.0, sent_bytes=sent, saved_bytes=saved, codec_error=error
        )

    assert status_of(run(), 120.0, RuntimeStatus()).clusters[0].averaging is None
    nodes = {"attic": report(4, 100, 300, 0.01), "barn": report(4, 50, 150, nan), "away": report(9, 1, 1, 0.0)}
    averaged = status_of(run(), 120.0, RuntimeStatus(averages=nodes)).clusters[0].averaging
    assert averaged is not None
    assert (averaged.round, averaged.sent_bytes, averaged.saved_bytes, averaged.codec_error) == (4, 150, 450, 0.01)
    late = (
        status_of(run(), 120.0, RuntimeStatus(averages={**nodes, "barn": report(3, 50, 150, 0.5)}))
        .clusters[0]
        .averaging
    )
    assert late is not None
    assert (late.sent_bytes, late.codec_error) == (100, 0.01)
