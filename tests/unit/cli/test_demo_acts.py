"""The demo's acts follow from the events of the run, and say so when one fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ravnest.cli.dashboard import may_open_browser
from ravnest.cli.demo_acts import ACTS, AddNode, CrashNode, DemoAction, DemoActs, DemoConfig, EndRun, Say
from ravnest.cli.render_demo import Comparison, loss_picture, smoothed, staleness_of
from ravnest.coordinator import events as on
from ravnest.coordinator.events import ClusterSpec, Event
from ravnest.protocol.control import NodeProfile
from ravnest.protocol.peer import PeerAddresses

MEMORY = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 3, "f": 3, "new": 5}
CONFIG = DemoConfig(  # an act every 10 batches
    steps=60, new_node="new", act_s=1000.0, late_s=5000.0, fail_s=500.0, usual_s=1000.0, most_s=5000.0
)  # fmt: skip


def cluster(name: str, *members: str) -> ClusterSpec:
    return ClusterSpec(
        id=name, generation=1, members=members, cuts=tuple(range(1, len(members))), accumulate=1,
        depths=(1,) * len(members), samples_per_s=1.0, reason="",
    )  # fmt: skip


class Demo:
    """A demo whose events are given one by one, a second apart."""

    def __init__(self, config: DemoConfig = CONFIG) -> None:
        self.acts, self.now_s, self.batch = DemoActs(config, 100.0), 100.0, 0
        self.actions: list[DemoAction] = []

    def add(self, *events: Event) -> None:
        for event in events:
            for action in self.acts.handle(event):
                self.actions.append(action)
                if isinstance(action, CrashNode):
                    self.acts.crashed(self.now_s)
            self.now_s += 1.0

    def connect(self, names: Iterable[str]) -> None:
        for name in names:
            profile = NodeProfile(memory_bytes=MEMORY[name], gflops=1.0)
            self.add(on.NodeConnected(self.now_s, name, profile, PeerAddresses(), "", 0))

    def plan(self, *clusters: ClusterSpec) -> None:
        self.add(on.PlanCreated(self.now_s, 1, clusters, (), (), "", 0.1))

    def train(self, cluster: str, batches: int) -> None:
        for _ in range(batches):
            self.add(on.LeaseGranted(self.now_s, cluster, self.batch), on.LeaseSettled(self.now_s, cluster, self.batch))
            self.batch += 1

    def average(self) -> None:
        self.add(on.RingsFormed(self.now_s, 1, ("x", "y"), (("a", "d"), ("b", "e")), ""))
        self.add(on.RoundCommitted(self.now_s, 1, 0, 0.5))

    def start(self) -> None:
        self.connect("abcdef")
        self.plan(cluster("x", "a", "b", "c"), cluster("y", "d", "e", "f"))

    def of(self, kind: type[DemoAction]) -> Sequence[DemoAction]:
        return [action for action in self.actions if isinstance(action, kind)]


def test_all_acts_in_order() -> None:
    demo = Demo()
    demo.start()
    demo.train("x", 20)
    assert not demo.of(CrashNode)  # not before an average
    demo.average()
    assert demo.of(CrashNode) == [CrashNode("c")]  # of the cluster whose others have most memory, the smallest
    demo.add(on.LeaseGranted(demo.now_s, "x", 90), on.LeaseReturned(demo.now_s, "x", 90, "failed"))
    demo.add(on.ClusterEnded(demo.now_s, "x", "lost c", is_lost=True))
    demo.train("y", 20)
    assert not demo.of(AddNode)  # not before the repair
    demo.plan(cluster("z", "a", "b"))
    demo.train("z", 1)
    assert demo.acts.recovery_s is not None
    assert demo.acts.recovery_s > 20
    demo.train("z", 5)
    assert demo.of(AddNode) == [AddNode("new")]
    demo.connect(["new"])
    demo.train("z", 30)
    assert not demo.of(EndRun)  # not before the new node trains
    demo.plan(cluster("w", "new", "a", "b"))
    demo.train("w", 11)
    assert demo.of(EndRun)
    assert [action.act for action in demo.of(Say) if isinstance(action, Say) and action.act] == list(ACTS)
    assert list(demo.acts.happened) == list(ACTS)
    assert demo.acts.is_complete
    assert (demo.acts.batches.leased, demo.acts.batches.returned) == (demo.batch + 1, 1)
    was_balanced = demo.acts.batches.is_balanced
    demo.add(on.LeaseSettled(demo.now_s, "w", 0))  # also events after the end count
    assert (was_balanced, demo.acts.batches.is_balanced, demo.acts.batches.repeated) == (True, False, 1)


def test_acts_that_fail_are_said_and_do_not_hold_up_the_demo() -> None:
    demo = Demo()
    demo.start()
    demo.train("x", 20)
    demo.average()
    demo.add(on.ClusterEnded(demo.now_s, "x", "lost c", is_lost=True))
    demo.add(on.PlanFailed(demo.now_s, "too little memory", ("a", "b")))
    demo.train("y", 1)
    assert demo.of(AddNode)
    demo.connect(["new"])
    demo.add(on.ReplanConsidered(demo.now_s, ("new",), (), "no gain"))
    demo.train("y", 60)
    assert demo.of(EndRun)
    assert list(demo.acts.happened) == ["form", "average", "crash"]
    said = [action.text for action in demo.of(Say) if isinstance(action, Say) and "not as planned" in action.text]
    assert len(said) == 2
    assert "too little memory" in said[0]
    assert "no gain" in said[1]


def test_acts_on_a_slow_machine_follow_after_a_while_and_at_once_when_late() -> None:
    """A batch takes 10 s here."""
    config = DemoConfig(
        steps=6000, new_node="new", act_s=30.0, late_s=250.0, fail_s=400.0, usual_s=300.0, most_s=900.0
    )  # fmt: skip
    demo = Demo(config)

    def train(cluster: str, batches: int) -> None:
        for _ in range(batches):
            demo.train(cluster, 1)
            demo.now_s += 8.0

    demo.start()
    demo.average()
    train("x", 3)
    assert not demo.of(CrashNode)
    train("x", 2)
    assert demo.of(CrashNode)
    demo.add(on.ClusterEnded(demo.now_s, "x", "lost c", is_lost=True))
    train("y", 20)
    assert demo.now_s > 100.0 + config.late_s
    demo.plan(cluster("z", "a", "b"))
    train("z", 1)
    assert demo.of(AddNode), "without a pause"
    demo.connect(["new"])
    demo.plan(cluster("w", "new", "a", "b"))
    demo.now_s += 50.0
    train("w", 1)
    assert demo.of(EndRun), "all acts have happened, and it has taken long enough"
    assert demo.acts.is_complete


def test_a_demo_without_progress_ends() -> None:
    demo = Demo(DemoConfig(steps=60, new_node="new", act_s=5.0, fail_s=5.0, usual_s=10.0, most_s=50.0))
    demo.start()
    demo.train("x", 30)  # never an average: 60 s
    assert demo.of(EndRun)
    assert not demo.of(CrashNode)


def test_losses_as_a_picture() -> None:
    picture = loss_picture([(1, 5.0), (10, 2.0)], [(10, 3.0)], width=20, height=5).splitlines()
    assert picture[1].startswith("  5.00 │  ●") or picture[1].startswith("  5.00 │ ●")
    assert picture[5].endswith("●")
    assert picture[5].startswith("  2.00")
    assert any(row.endswith("·") for row in picture[1:6])
    assert "10 batches" in picture[7]
    assert loss_picture([], []) == "no loss was reported"
    assert smoothed([(1, 4.0), (2, 2.0), (3, 0.0)], 2) == [(1, 4.0), (2, 3.0), (3, 1.0)]


def test_staleness_is_counted_once_per_stage() -> None:
    stages = [{"stage": 0, "staleness": {"0": 1, "1": 3}}, {"stage": 1, "staleness": {"1": 4}}]
    lines: list[dict[str, Any]] = [{"cluster": "x", "stages": [{"stage": 0, "staleness": {"0": 1}}]}, {"round": 1},
             {"cluster": "x", "stages": stages}, {"cluster": "y", "stages": stages[1:]}]  # fmt: skip
    assert staleness_of(lines) == {0: 1, 1: 11}


def test_the_comparison_names_both_losses() -> None:
    assert Comparison(2.2, 2.0).text == "2.200; one synchronous process: 2.000 (+10.0%)"
    assert "did not finish" in Comparison(2.2, None).text
    assert "had trained 90 batches" in Comparison(2.2, None, (90.0, 2.5, 2.6)).text


@pytest.mark.parametrize(
    ("environment", "platform", "may"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"DISPLAY": ":0", "CI": "true"}, "linux", False),
        ({}, "darwin", True),
        ({"CI": "1"}, "win32", False),
    ],
)
def test_a_browser_is_opened_where_there_is_a_display(environment: dict[str, str], platform: str, *, may: bool) -> None:
    assert may_open_browser(environment, platform) is may
