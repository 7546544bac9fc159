"""The status says what is known, whatever has happened, as JSON that reads back."""

from __future__ import annotations

from math import inf, nan

import msgspec
from hypothesis import given, settings

from ravnest.coordinator import events as on
from ravnest.coordinator.decide import Wishes
from ravnest.coordinator.state import State, apply
from ravnest.coordinator.status import Live, Status, status_of
from ravnest.core.metrics import StageMetrics
from ravnest.core.orders import Averaged
from ravnest.net.hub import PairStats
from tests.coordinator.histories import cluster, connected, history, numbers, planned, state_of


def through_json(status: Status) -> Status:
    return msgspec.json.decode(msgspec.json.encode(status), type=Status)


@settings(deadline=None)
@given(numbers)
def test_any_state_has_a_status_that_reads_back(moves: list[tuple[int, int]]) -> None:
    events = history(moves)
    state = state_of(events)
    status = status_of(state, events[-1].at_s, Live())
    assert through_json(status) == status
    assert b"secret" not in msgspec.json.encode(status)
    assert {node.name for node in status.nodes} == state.members.keys() | state.nodes.keys()
    for node in status.nodes:
        assert node.state in ("free", "forming", "training", "left out", "gone", "kicked", "enrolled")
        assert node.why
        assert (node.stage is None) == (node.cluster is None)
    for found in status.clusters:
        members = {node.name for node in status.nodes if node.cluster == found.id}
        assert members == ({stage.name for stage in found.stages} if found.phase in ("forming", "training") else set())
    counted = status.leases
    assert counted.granted == counted.settled + counted.repeated + counted.outstanding + counted.returned
    assert status.steps_done == counted.settled


def run() -> State:
    return state_of([
        on.RunBegun(100.0, "r", 5, "1.2"), on.NodeEnrolled(100.0, "attic", "key", "t"), connected(101.0, "attic"),
        connected(101.0, "barn"), planned(102.0, cluster(1, "barn", "attic")), on.NodeReady(103.0, "c1", "attic"),
        on.LinkMade(103.0, "c1", "attic", "barn", "relayed", "a NAT\x1b[2J", "open a port"),
        on.NodeReady(104.0, "c1", "barn"), on.LeaseGranted(105.0, "c1", 0), on.LeaseSettled(106.0, "c1", 0),
        on.LeaseGranted(106.0, "c1", 1),
    ])  # fmt: skip


def test_nodes_and_clusters_with_what_they_do() -> None:
    state = run()
    state.heard("attic", 108.0, "training\nhard")
    metrics = StageMetrics(
        stage=1, updates=7, idle_s=1.0, steady_busy_s=3.0, memory_bytes=10, sent_bytes=20, received_bytes=30
    )
    live = Live(
        metrics={("c1", 1): metrics},
        losses={"c1": 2.5},
        samples_per_s={"c1": 8.0},
        relay=[PairStats(("attic", "barn"), (3, 4), 1, True)],
    )
    status = status_of(state, 110.0, live)
    assert (status.run, status.release, status.uptime_s, status.generation) == ("r", "1.2", 10.0, 1)
    assert (status.steps_done, status.steps) == (1, 5)
    attic = status.nodes[0]
    assert (attic.name, attic.state, attic.cluster, attic.stage) == ("attic", "training", "c1", 1)
    assert (attic.doing, attic.heard_s_ago) == ("training hard", 2.0)
    assert [(link.peer, link.how, link.reason) for link in attic.links] == [("barn", "relayed", "a NAT [2J")]
    found = status.clusters[0]
    assert (found.phase, found.planned_samples_per_s, found.samples_per_s, found.loss) == ("training", 10.0, 8.0, 2.5)
    assert [stage.name for stage in found.stages] == ["barn", "attic"]
    assert (found.stages[1].updates, found.stages[1].bubble, found.stages[1].sent_bytes) == (7, 0.25, 20)
    assert (found.leases.granted, found.leases.settled, found.leases.outstanding) == (2, 1, 1)
    assert (status.relay[0].names, status.relay[0].carried_bytes) == (("attic", "barn"), 7)
    assert status.events[-1].text == "cluster c1 trains: all 2 members are ready"


def test_why_a_node_does_nothing() -> None:
    state = run()
    apply(state, on.NodeBlamed(110.0, "attic", "it ran out of memory"))
    apply(state, on.NodeGone(111.0, "barn", "its line broke", polite=False))
    apply(state, on.ClusterEnded(111.0, "c1", "barn is gone", is_lost=True))
    attic, barn = status_of(state, 120.0, Live()).nodes
    assert (attic.state, attic.why) == ("left out", "for another 290 s: it ran out of memory")
    assert (barn.state, barn.why) == ("gone", "its line broke")
    attic = status_of(state, 120.0, Live(wishes=Wishes(blame_s=5.0))).nodes[0]
    assert (attic.state, attic.why) == ("free", "cluster c1 ended: barn is gone")
    apply(state, on.NodeKicked(130.0, "attic", "it lied"))
    attic = status_of(state, 131.0, Live()).nodes[0]
    assert (attic.state, attic.why) == ("kicked", "it lied")


def test_a_node_that_lies_about_its_numbers_spoils_no_status() -> None:
    live = Live(metrics={("c1", 0): StageMetrics(idle_s=inf, steady_busy_s=nan)}, losses={"c1": nan})
    status = through_json(status_of(run(), 110.0, live))
    assert status.clusters[0].loss is None
    assert status.clusters[0].stages[0].bubble == 0.0


def test_refusals_and_events_are_told_and_bounded() -> None:
    state = run()
    for number in range(300):
        apply(state, on.CallerRefused(120.0, "198.51.100.7", f"wrong token {number}", 3))
    status = status_of(state, 121.0, Live())
    assert status.refused == 900
    assert len(status.refusals) == 50
    assert status.refusals[-1].reason == "wrong token 299"
    assert len(status.events) == 100
    assert status.events[-1].text == "refused 198.51.100.7 3 times: wrong token 299"


def test_a_status_before_anything_happened() -> None:
    status = through_json(status_of(State(), 100.0, Live()))
    assert (status.run, status.uptime_s, status.nodes, status.clusters) == ("", 0.0, (), ())


def test_what_the_last_round_took_is_told_by_cluster() -> None:
    def told(number: int, sent: int, saved: int, error: float) -> Averaged:
        return Averaged(
            round=number, attempt=0, digests={}, seconds=2.0, sent_bytes=sent, saved_bytes=saved, codec_error=error
        )

    assert status_of(run(), 120.0, Live()).clusters[0].averaged is None
    nodes = {"attic": told(4, 100, 300, 0.01), "barn": told(4, 50, 150, nan), "away": told(9, 1, 1, 0.0)}
    averaged = status_of(run(), 120.0, Live(averaged=nodes)).clusters[0].averaged
    assert averaged is not None
    assert (averaged.round, averaged.sent_bytes, averaged.saved_bytes, averaged.codec_error) == (4, 150, 450, 0.01)
    late = status_of(run(), 120.0, Live(averaged={**nodes, "barn": told(3, 50, 150, 0.5)})).clusters[0].averaged
    assert late is not None
    assert (late.sent_bytes, late.codec_error) == (100, 0.01)
