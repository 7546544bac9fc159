"""Averaging rounds: all members apply the same average or none does, and no round hangs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.apply import apply, restore, snapshot
from ravnest.coordinator.events import ClusterSpec
from ravnest.coordinator.policy.averaging import (
    AveragingPolicy,
    CloseRound,
    CommitRound,
    FormNewRings,
    StartRound,
    decide_round,
)
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import NodeProfile
from ravnest.protocol.peer import PeerAddresses

POLICY = AveragingPolicy(average_every=50, grace_s=10.0)
PROFILE = NodeProfile(memory_bytes=10**9, gflops=10.0)


class World:
    """A coordinator's state, and nodes that may answer."""

    def __init__(self, sizes: list[int]) -> None:
        self.state, self.now_s = CoordinatorState(), 0.0
        self.do(on.RunStarted(0.0, "run", None, ""))
        self.members = {f"c{i}": tuple(f"n{i}-{j}" for j in range(size)) for i, size in enumerate(sizes)}
        for names in self.members.values():
            for name in names:
                self.do(on.NodeConnected(0.0, name, PROFILE, PeerAddresses(), "", 0))
        clusters = tuple(
            ClusterSpec(
                id=name, generation=1, members=members, cuts=tuple(range(1, len(members))), accumulate=1,
                depths=(1,) * len(members), samples_per_s=1.0, reason="",
            )
            for name, members in self.members.items()
        )  # fmt: skip
        self.do(on.PlanCreated(0.0, 1, clusters, (), (), "", 0.0))
        for cluster, members in self.members.items():
            for name in members:
                self.do(on.NodeReady(0.0, cluster, name))
        self.batch = 0

    def do(self, event: on.Event) -> None:
        apply(self.state, event)

    def train(self, cluster: str, samples: int) -> None:
        if self.state.is_training(cluster):
            self.do(on.LeaseGranted(self.now_s, cluster, self.batch))
            self.do(on.LeaseSettled(self.now_s, cluster, self.batch, samples))
            self.batch += 1

    def lose(self, cluster: str) -> None:
        self.do(on.ClusterEnded(self.now_s, cluster, "lost", True))

    def decide(self) -> list[object]:
        """Decide once, and carry it out as the coordinator behaviour."""
        decisions = decide_round(self.state, self.now_s, POLICY)
        for decision in decisions:
            match decision:
                case FormNewRings(clusters=clusters, reason=reason):
                    rings = tuple(zip(*(self.members[c] for c in clusters), strict=False))
                    self.do(on.RingsFormed(self.now_s, self.state.generation + 1, clusters, rings, reason))
                    for name in self.in_rings():
                        self.do(on.NodeRingsReady(self.now_s, name, self.state.generation))
                case StartRound(number=number, attempt=attempt, weights=weights, reason=reason):
                    self.do(on.RoundStarted(self.now_s, number, attempt, weights, reason))
                case CommitRound(number=number, attempt=attempt):
                    self.do(on.RoundCommitted(self.now_s, number, attempt, 0.0))
                case CloseRound(number=number, reason=reason):
                    self.do(on.RoundClosed(self.now_s, number, reason))
        return list(decisions)

    def in_rings(self) -> set[str]:
        return self.state.rings.members if self.state.rings is not None else set()

    def participants(self) -> set[str]:
        now = self.state.round
        assert now is not None
        return {name for cluster in now.weights for name in self.members[cluster] if name in self.in_rings()}

    def begin(self, name: str) -> None:
        assert self.state.round is not None
        self.do(on.NodeAveragingStarted(self.now_s, name, self.state.round.number))

    def average(self, name: str, digest: int = 7) -> None:
        now = self.state.round
        assert now is not None
        self.begin(name)
        self.do(on.NodeAverageReady(self.now_s, name, now.number, now.attempt, {0: str(digest)}))

    def fail(self, name: str, peer: str) -> None:
        now = self.state.round
        assert now is not None
        self.do(on.NodeAveragingFailed(self.now_s, name, now.number, now.attempt, "it broke", peer))

    def apply_average(self, name: str) -> None:
        assert self.state.round is not None
        self.do(on.NodeAverageApplied(self.now_s, name, self.state.round.number))


def with_round(world: World) -> World:
    """Rings are formed and a round has started."""
    world.decide()
    for cluster in world.members:
        world.train(cluster, 60)
    world.decide()
    assert world.state.round is not None
    return world


def test_a_round_from_start_to_end() -> None:
    world = World([2, 2])
    assert isinstance(world.decide()[0], FormNewRings)
    assert world.decide() == []
    world.train("c0", 40)
    world.train("c1", 50)
    assert world.decide() == []
    world.train("c1", 10)
    (first,) = world.decide()
    assert isinstance(first, StartRound)
    assert first.weights == {"c0": 40.0, "c1": 60.0}
    names = sorted(world.participants())
    for name in names[:-1]:
        world.average(name)
        assert world.decide() == []
    world.train("c0", 7)  # while the others finish: it is not in this average
    world.average(names[-1])
    assert isinstance(world.decide()[0], CommitRound)
    assert world.state.samples_since_average == {"c0": 7, "c1": 0}
    for name in names:
        assert world.decide() == []
        world.apply_average(name)
    assert world.decide() == [CloseRound(1, "")]
    assert world.state.round is None
    assert world.state.rounds_done == 1


def test_a_new_cluster_has_zero_weight_in_its_first_round() -> None:
    world = World([1, 1, 1])
    world.decide()
    world.train("c0", 90)
    world.train("c1", 60)
    (first,) = world.decide()
    assert isinstance(first, StartRound)
    assert first.weights == {"c0": 90.0, "c1": 60.0, "c2": 0.0}  # it has trained almost nothing
    for name in world.participants():
        world.average(name)
    world.decide()
    for name in world.participants():
        world.apply_average(name)
    world.decide()
    world.train("c2", 70)
    world.train("c0", 90)
    (second,) = world.decide()
    assert isinstance(second, StartRound)
    assert second.weights == {"c0": 90.0, "c1": 0.0, "c2": 70.0}


def test_a_lost_cluster_costs_one_more_attempt_among_the_others() -> None:
    world = with_round(World([2, 2, 2]))
    world.lose("c1")
    (again,) = world.decide()
    assert isinstance(again, StartRound)
    assert (again.number, again.attempt, set(again.weights)) == (1, 1, {"c0", "c2"})
    for name in world.participants():
        world.average(name)
    assert isinstance(world.decide()[0], CommitRound)


def test_a_single_cluster_cannot_average() -> None:
    world = with_round(World([2, 2]))
    world.lose("c1")
    (closed,) = world.decide()
    assert isinstance(closed, CloseRound)
    assert "lost c1" in closed.reason
    assert world.state.samples_since_average["c0"] == 60  # counts the next time


def test_a_slow_cluster_contributes_the_next_time() -> None:
    world = with_round(World([1, 1, 1]))
    world.begin("n0-0")
    world.begin("n1-0")
    world.now_s += 9.9
    assert world.decide() == []
    world.now_s += 0.2
    (again,) = world.decide()
    assert isinstance(again, StartRound)
    assert set(again.weights) == {"c0", "c1"}
    for name in world.participants():
        world.average(name)
    world.decide()
    assert world.state.samples_since_average == {"c0": 0, "c1": 0, "c2": 60}


def test_a_failed_peer_is_left_out_if_others_remain() -> None:
    world = with_round(World([1, 1, 1]))
    world.fail("n0-0", "n2-0")
    (again,) = world.decide()
    assert isinstance(again, StartRound)
    assert set(again.weights) == {"c0", "c1"}


def test_differing_averages_are_not_applied() -> None:
    world = with_round(World([1, 1]))
    world.average("n0-0", digest=1)
    world.average("n1-0", digest=2)
    (closed,) = world.decide()
    assert isinstance(closed, CloseRound)
    assert "differ" in closed.reason


def test_a_final_round_averages_remaining_samples() -> None:
    world = World([1, 1])
    world.decide()
    world.train("c0", 5)
    assert decide_round(world.state, 0.0, POLICY) == []
    (last,) = decide_round(world.state, 0.0, POLICY, is_final=True)
    assert isinstance(last, StartRound)
    assert last.weights == {"c0": 5.0, "c1": 0.0}


STEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50)), max_size=80)


@settings(max_examples=150, deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4), steps=STEPS)
def test_any_history(sizes: list[int], steps: list[tuple[int, int]]) -> None:
    """Only equal averages are committed; a snapshot restores the state; no round waits forever."""
    world = World(sizes)
    for kind, choice in steps:
        _happen(world, kind, choice)
        for decision in world.decide():
            if isinstance(decision, CommitRound):
                now = world.state.round
                assert now is not None
                assert now.digests.keys() >= world.participants()
                assert len({tuple(sorted(d.items())) for d in now.digests.values()}) <= 1
        assert restore(snapshot(world.state)) == world.state
    for _ in range(60):  # from now on the remaining clusters answer
        world.now_s += 5 * POLICY.grace_s
        for cluster in world.members:
            world.train(cluster, 10)
        if world.state.round is not None:
            for name in world.participants():
                (world.apply_average if world.state.round.is_committed else world.average)(name)
        before = world.state.rounds_done
        world.decide()
        if world.state.rounds_done > before:
            return
    assert len(world.state.training_clusters()) < 2


def _happen(world: World, kind: int, choice: int) -> None:
    clusters, now = list(world.members), world.state.round
    cluster = clusters[choice % len(clusters)]
    if kind == 0 and choice % 5 == 0:
        world.lose(cluster)
    elif kind == 1:
        world.now_s += choice / 4
    elif kind == 2:
        world.train(cluster, choice)
    elif now is not None and world.participants():
        names = sorted(world.participants())
        name, other = names[choice % len(names)], names[choice // 2 % len(names)]
        if now.is_committed:
            world.apply_average(name)
        elif kind == 3:
            world.begin(name)
        elif kind == 4:
            world.fail(name, other)
        else:
            world.average(name, digest=7 if choice % 17 else choice)


def test_rings_with_missing_links_are_formed_again() -> None:
    world = World([2, 2])
    world.decide()
    rings = world.state.rings
    assert rings is not None
    rings.ready.discard("n0-1")
    world.now_s = 59.9
    assert world.decide() == []
    world.now_s = 60.0
    (again,) = world.decide()
    assert again == FormNewRings(("c0", "c1"), "n0-1 had no complete set of ring links after 60 s")
    assert world.decide() == []
