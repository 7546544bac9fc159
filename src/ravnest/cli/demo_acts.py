"""Decides what happens in `ravnest demo`, and when: pure, from the coordinator's events.

    form      the planner groups six uneven nodes into clusters
    average   the clusters have averaged their parameters over parallel rings
    crash     a node of a cluster ends without warning
    repair    the cluster that replaces it has trained a batch
    join      another node has joined, and a cluster with it has trained a batch

An act starts when enough batches are trained since the last one, on a slow machine after a while, and when the demo is
late at once: acts follow from what has happened, within a budget of time for the whole demo. Where an act fails, the
demo continues and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ravnest.coordinator.events import (
    ClusterEnded,
    ClusterSpec,
    Event,
    LeaseGranted,
    LeaseReturned,
    LeaseSettled,
    NodeConnected,
    PlanCreated,
    PlanFailed,
    ReplanConsidered,
    RingsFormed,
    RoundCommitted,
)
from ravnest.core.config import config
from ravnest.core.units import format_bytes

__all__ = ["ACTS", "AddNode", "CrashNode", "DemoActs", "DemoConfig", "EndRun", "Say"]

ACTS = ("form", "average", "crash", "repair", "join")


@config
class DemoConfig:
    """When acts happen. Times are seconds since the start of the demo, if not said otherwise.

    Args:
        steps: Batches of the whole demo, if that takes at most until `usual_s`.
        new_node: Name of the node that joins.
        act_s: Seconds of training between two acts, at most.
        late_s: From this time on, an act starts as soon as the one before it is over.
        fail_s: Seconds after which an act counts as failed.
        usual_s: The training ends at this time, once all acts have happened.
        most_s: The training ends at this time in any case.
    """

    steps: int = 300
    new_node: str = "node-6"
    act_s: float = 12.0
    late_s: float = 60.0
    fail_s: float = 60.0
    usual_s: float = 110.0
    most_s: float = 145.0

    @property
    def part(self) -> int:
        """Batches between two acts."""
        return max(4, self.steps // 6)


@dataclass(frozen=True)
class Say:
    """Print a line; `act` is the act that has happened, if one has."""

    text: str
    act: str = ""


@dataclass(frozen=True)
class CrashNode:
    name: str


@dataclass(frozen=True)
class AddNode:
    name: str


@dataclass(frozen=True)
class EndRun:
    pass


DemoAction = Say | CrashNode | AddNode | EndRun


@dataclass
class BatchAccount:
    """Batches that were leased to clusters, returned by clusters that ended, and trained."""

    leased: int = 0
    returned: int = 0
    settled: dict[int, int] = field(default_factory=dict)  # times, by batch

    @property
    def trained(self) -> int:
        return len(self.settled)

    @property
    def repeated(self) -> int:
        """Batches that were trained more than once."""
        return sum(times > 1 for times in self.settled.values())

    @property
    def is_balanced(self) -> bool:
        """Whether every batch that was leased has been trained exactly once or returned."""
        return self.leased - self.returned == sum(self.settled.values()) and not self.repeated


class DemoActs:
    """The state of a demo that began at the unix time `start_s`. `handle` takes every event of the run, in order."""

    def __init__(self, settings: DemoConfig, start_s: float) -> None:
        self._config, self._start_s = settings, start_s
        self.batches = BatchAccount()
        self.happened: dict[str, float] = {}  # the coordinator's time of each act
        self.rounds, self.round_s = 0, 0.0
        self.num_rings = 0
        self._clusters: dict[str, ClusterSpec] = {}  # those that live
        self._memory: dict[str, int] = {}
        self._is_training = False
        self._goal, self._goal_s = 0, 0.0  # trained batches, and the time, at which the next act starts
        self._victim = ""
        self._repaired: set[str] = set()  # clusters that replace the one of the victim
        self._asked_s = 0.0  # when the act that is awaited was started
        self._is_new_asked = self._is_over = False
        self._given_up: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every act has happened."""
        return all(act in self.happened for act in ACTS)

    @property
    def recovery_s(self) -> float | None:
        """From the crash to the first batch that the replacement of its cluster trained."""
        return self.happened["repair"] - self.happened["crash"] if "repair" in self.happened else None

    def crashed(self, at_s: float) -> None:
        """The node was ended, at this time of the coordinator."""
        self.happened["crash"] = self._asked_s = at_s

    def handle(self, event: Event) -> Iterator[DemoAction]:
        """Yield what to do now."""
        if self._is_over:
            self._account(event)
            return
        yield from self._observe(event)
        yield from self._next(event.at_s)

    def _account(self, event: Event) -> None:
        batches = self.batches
        match event:
            case LeaseGranted():
                batches.leased += 1
            case LeaseReturned():
                batches.returned += 1
            case LeaseSettled(batch=batch):
                batches.settled[batch] = batches.settled.get(batch, 0) + 1
            case RoundCommitted(took_s=took_s):
                self.rounds += 1
                self.round_s += took_s

    def _observe(self, event: Event) -> Iterator[DemoAction]:
        self._account(event)
        match event:
            case NodeConnected(name=name, profile=profile):
                if name == self._config.new_node and name not in self._memory:
                    lent = format_bytes(profile.memory_bytes)
                    yield Say(f"{name} joined and lends {lent}: the planner looks for a better plan with it")
                self._memory[name] = profile.memory_bytes
            case PlanCreated(clusters=clusters):
                yield from self._planned(clusters, event.at_s)
            case ClusterEnded(cluster=cluster):
                self._clusters.pop(cluster, None)
            case RingsFormed(rings=rings):
                self.num_rings = max(self.num_rings, len(rings))
            case RoundCommitted(took_s=took_s):
                if self._reached("average", event.at_s):
                    text = f"the clusters averaged their parameters over {self.num_rings} rings at once"
                    yield Say(f"{text}, in {took_s:.2f} s, while they trained on", "average")
            case LeaseSettled(cluster=cluster):
                yield from self._trained(cluster, event.at_s)
            case PlanFailed(reason=reason) if self._victim and "repair" not in self.happened:
                yield from self._give_up("repair", event.at_s, f"the rest of its cluster cannot train alone: {reason}")
            case ReplanConsidered(nodes=nodes, ending_clusters=(), reason=reason):
                if self._config.new_node in nodes:
                    yield from self._give_up("join", event.at_s, f"the planner keeps the new node free: {reason}")

    def _planned(self, clusters: tuple[ClusterSpec, ...], at_s: float) -> Iterator[DemoAction]:
        for cluster in clusters:
            self._clusters[cluster.id] = cluster
        if not clusters:
            return
        shown = "; ".join(_shown(cluster) for cluster in clusters)
        if self._reached("form", at_s):
            yield Say(f"the planner formed {_count(len(clusters))} of 6 uneven nodes: {shown}", "form")
        elif self._victim and "repair" not in self.happened:
            self._repaired |= {cluster.id for cluster in clusters}
            yield Say(f"the planner cut the model again: {shown}")
        else:
            yield Say(f"the planner made a better plan: {shown}")

    def _trained(self, cluster: str, at_s: float) -> Iterator[DemoAction]:
        if not self._is_training:
            self._is_training = True
            self._pause(self._config.part, at_s)
            yield Say("training: each cluster is a pipeline, and no stage waits for the others' updates")
        if cluster in self._repaired and self._reached("repair", at_s):
            self._pause(self._config.part // 2, at_s)
            yield Say(f"repaired: cluster {cluster} trains again, {self.recovery_s:.1f} s after the crash", "repair")
        members = self._clusters[cluster].members if cluster in self._clusters else ()
        if self._config.new_node in members and self._reached("join", at_s):
            self._pause(self._config.part, at_s)
            yield Say(f"{self._config.new_node} trains a stage of cluster {cluster}", "join")

    def _pause(self, batches: int, at_s: float) -> None:
        """Let the clusters train before the next act: so many batches, or for a while."""
        settings = self._config
        late_s = max(self._start_s + settings.late_s, at_s)
        self._goal, self._goal_s = self.batches.trained + batches, min(at_s + settings.act_s, late_s)

    def _next(self, at_s: float) -> Iterator[DemoAction]:
        """Start the next act, or end, if it is time."""
        settings, seconds = self._config, at_s - self._start_s
        is_due = self._is_training and (self.batches.trained >= self._goal or at_s >= self._goal_s)
        if not self._victim:
            if is_due and "average" in self.happened and (victim := self._choose_victim()):
                self._victim = victim
                yield Say(f"ending {victim} without warning, as if its PC lost power", "crash")
                yield CrashNode(victim)
        elif not self._is_new_asked:
            if not self._is_done("repair") and at_s > self._asked_s + settings.fail_s:
                yield from self._give_up("repair", at_s, f"its cluster was not repaired within {settings.fail_s:g} s")
            if self._is_done("repair") and is_due:
                self._is_new_asked, self._asked_s = True, at_s
                yield AddNode(settings.new_node)
        elif not self._is_done("join") and at_s > self._asked_s + settings.fail_s:
            yield from self._give_up("join", at_s, f"no cluster used the new node within {settings.fail_s:g} s")
        is_long = self.batches.trained >= settings.steps or seconds >= settings.usual_s
        if (self._is_done("join") and is_due and is_long) or seconds >= settings.most_s:
            self._is_over = True
            yield EndRun()

    def _choose_victim(self) -> str:
        """Return the member with the least memory of the cluster that can best do without one."""
        memory = self._memory
        large = [c for c in self._clusters.values() if len(c.members) > 2]
        if not large:
            return ""
        cluster = max(large, key=lambda c: (sum(sorted(memory[m] for m in c.members)[1:]), c.id))
        return min(cluster.members, key=lambda name: (memory[name], name))

    def _is_done(self, act: str) -> bool:
        return act in self.happened or act in self._given_up

    def _reached(self, act: str, at_s: float) -> bool:
        """Record an act the first time it happens; whether it is the first time."""
        if act in self.happened:
            return False
        self.happened[act] = at_s
        return True

    def _give_up(self, act: str, at_s: float, reason: str) -> Iterator[DemoAction]:
        if not self._is_done(act):
            self._given_up.add(act)
            self._goal, self._goal_s, self._asked_s = self.batches.trained, at_s, at_s
            yield Say(f"not as planned: {reason}")


def _count(clusters: int) -> str:
    return "1 cluster" if clusters == 1 else f"{clusters} clusters"


def _shown(cluster: ClusterSpec) -> str:
    cuts = ", ".join(map(str, cluster.cuts))
    return f"{cluster.id} = {' > '.join(cluster.members)}, cut before operation {cuts}"
