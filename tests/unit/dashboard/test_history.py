"""Series stay bounded, contributions add up, deltas rebuild what a snapshot holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.core.metrics import StageMetrics
from ravnest.core.units import UNLIMITED_BYTES
from ravnest.dashboard.contributions import Contributions
from ravnest.dashboard.document import LiveDocument
from ravnest.dashboard.history import RunHistory, load_saved
from ravnest.dashboard.series import NodeSeries, Series
from ravnest.protocol.control import NodeProfile
from ravnest.protocol.peer import PeerAddresses

numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.one_of(numbers, st.just(math.nan)), max_size=300))
def test_a_series_is_bounded_and_keeps_the_mean(values: list[float]) -> None:
    series = Series(limit=8)
    for step, value in enumerate(values):
        series.add([step, float(step), step * 3, value])
    assert len(series.points) < 8
    shown = series.stride * len(series.points)
    assert len(values) - series.stride < shown <= len(values)
    if shown:
        assert series.points[-1][:3] == [shown - 1, shown - 1, 3 * (shown - 1)]
    if not any(math.isnan(value) for value in values):
        means = [point[3] for point in series.points]
        assert math.isclose(sum(m or 0.0 for m in means) * series.stride, sum(values[:shown]), abs_tol=1e-3)


def test_a_series_of_a_node_keeps_the_last_counters() -> None:
    series = NodeSeries(limit=4)
    for number in range(20):
        series.add([number, number * 10, 1.0, 0.0, 5, 6, 7])
    assert all(point[1] == point[0] * 10 for point in series.points if point[0] is not None and point[1] is not None)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["settle", "end", "form"]), st.integers(0, 2), st.integers(1, 64)), max_size=60),
    st.lists(st.floats(0, 10), min_size=3, max_size=3),
)
def test_the_work_of_all_nodes_is_the_samples_of_the_run(
    moves: list[tuple[str, int, int]], shares: list[float]
) -> None:
    counted = Contributions()
    samples = 0
    live: set[int] = set()
    for at_s, (kind, number, size) in enumerate(moves):
        name = f"c{number}"
        if kind == "form" and number not in live:
            live.add(number)
            counted.form(name, [f"n{number}", f"n{number + 1}", "shared"], shares)
            counted.begin(name, at_s)
        elif kind == "end" and number in live:
            live.remove(number)
            counted.end(name, at_s)
        elif kind == "settle" and number in live:
            counted.settle(name, size)
            samples += size
    totals = counted.totals(len(moves))
    assert counted.samples == samples
    assert math.isclose(sum(one.work for one in totals.values()), samples, rel_tol=1e-9, abs_tol=1e-9)
    assert counted.totals(len(moves)) == totals, "reading changes nothing"


def test_contributions_continue_after_a_restart() -> None:
    before = Contributions()
    before.form("c1", ["ann", "bob"], [3, 1])
    before.begin("c1", 10.0)
    before.settle("c1", 8)
    before.report("c1", StageMetrics(stage=1, busy_s=2.0, sent_bytes=5, received_bytes=7))
    before.end("c1", 14.0)
    after = Contributions(before.past, batches=before.batches, samples=before.samples)
    after.form("c2", ["bob", "ann"], [1, 1])
    after.begin("c2", 20.0)
    after.settle("c2", 4)
    totals = after.totals(21.0)
    assert (totals["ann"].work, totals["bob"].work, after.samples) == (8.0, 4.0, 12)
    assert (totals["bob"].seconds, totals["bob"].busy_s, totals["bob"].sent_bytes) == (5.0, 2.0, 5)


class Viewer:
    """Applies messages as the page does."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.points: dict[str, list[Any]] = {"steps": [], "evaluations": []}

    def apply(self, data: bytes) -> None:
        message = json.loads(data)
        if message.get("reset"):
            self.__init__()  # type: ignore[misc]
        self.values |= message.get("set", {})
        for key in message.get("drop", []):
            del self.values[key]
        for name, points in self.points.items():
            if name in message:
                self.points[name] = points[: message[name]["from"]] + message[name]["points"]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(["run", "node/a", "node/b", "given/a"]), st.integers(0, 3)),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_deltas_rebuild_the_snapshot(changes: list[tuple[dict[str, int], int, bool]]) -> None:
    history = RunHistory()
    history.steps = Series(limit=6)
    document, viewer, expected = LiveDocument(history), Viewer(), dict[str, int]()
    viewer.apply(document.snapshot())
    for number, (values, steps, is_keeping) in enumerate(changes):
        for _ in range(steps):
            history.steps.add([number, 1.0, 2, 3.0])
        delta = document.update(values, keep="given/" if is_keeping else "")
        kept = {key: value for key, value in expected.items() if is_keeping and key.startswith("given/")}
        expected = {**kept, **values}
        if delta is not None:
            viewer.apply(delta)
        late = Viewer()
        late.apply(document.snapshot())
        assert viewer.values == late.values == expected
        assert viewer.points == late.points
        assert viewer.points["steps"] == history.steps.points
        assert document.update(values, keep="given/" if is_keeping else "") is None, "no news, no message"


def planned(*members: str) -> RunHistory:
    history = RunHistory()
    history.add_plan("c1", members, [1.0] * len(members), {"stages": []})
    return history


def line(step: int, **more: Any) -> dict[str, Any]:
    metrics = [{"stage": i, "microbatches": step, "busy_s": 1.0 * step, "memory_bytes": 9} for i in range(2)]
    return {"step": step, "cluster": "c1", "loss": 2.0, "seconds": 0.5 * step, "samples": 4, "stages": metrics, **more}


def test_metrics_become_curves_and_histories_of_nodes() -> None:
    history = planned("ann", "bob")
    for step in range(1, 4):
        history.add_line(line(step))
    history.add_line({"evaluation": 3, "cluster": "c1", "loss": 1.5, "seconds": 1.6})
    assert history.steps.points == [[1, 0.5, 4, 2.0], [2, 1.0, 8, 2.0], [3, 1.5, 12, 2.0]]
    assert history.evaluations.points == [[3, 1.6, 12, 1.5]]
    assert [point[1] for point in history.node("bob")["points"]] == [1, 2, 3]
    assert history.node("nobody")["points"] == []


@pytest.mark.parametrize(
    "bad", [{}, {"step": "x"}, {"step": 1}, line(1, seconds=None), line(1, stages=[{"stage": "a"}]), line(1, stages=7)]
)
def test_lines_of_another_form_are_ignored(bad: dict[str, Any]) -> None:
    history = planned("ann", "bob")
    history.add_line(bad)
    history.add_line(line(2))
    assert history.steps.points[-1][0] == 2


def test_events_name_their_nodes_and_hide_addresses() -> None:
    history = RunHistory()
    history.add_event(on.NodeLost(5.0, "ann", "silent", is_voluntary=False))
    history.add_event(on.ConnectionRejected(6.0, "198.51.100.7", "wrong token", 1))
    history.add_event(on.TokenIssued(6.0, "secret", 7.0, None))
    history.add_event(on.LeaseReturned(6.0, "c1", 1, "lost"))
    assert [(row.kind, row.nodes, row.text) for row in history.events] == [
        ("NodeLost", ("ann",), "ann is lost: silent")
    ]


def test_frequent_events_do_not_push_out_the_others() -> None:
    history = RunHistory()
    history.add_event(on.NodeLost(5.0, "ann", "silent", is_voluntary=False))
    for number in range(1000):
        history.add_event(on.RoundCommitted(6.0, number, 0, 0.5))
    assert history.events[0].kind == "NodeLost"
    assert history.events[-1].text.startswith("round 999 committed")
    assert len(history.events) < 100


def test_a_saved_history_is_read_back_and_a_broken_one_is_ignored(tmp_path: Path) -> None:
    history = planned("ann", "bob")
    history.add_event(on.NodeLost(5.0, "ann", "silent", is_voluntary=False))
    history.contributions.settle("c1", 4)
    history.save(tmp_path, {"run": b'{"name":"r"}'}, 9.0)
    saved = load_saved(tmp_path)
    assert saved is not None
    again = RunHistory(saved)
    assert (list(again.events), again.members, again.contributions.samples) == (
        list(history.events),
        history.members,
        4,
    )
    work = [one.work for one in again.contributions.totals(10.0).values()]
    assert work == [2.0, 2.0], "also of a cluster that had not ended"
    again.add_event(on.NodeLost(6.0, "bob", "silent", is_voluntary=False))
    assert [row.number for row in again.events] == [0, 1]
    (tmp_path / "dashboard.json").write_bytes(b'{"document": {"run"')
    assert load_saved(tmp_path) is None
    assert load_saved(tmp_path / "nowhere") is None


def test_a_local_node_without_a_limit_shows_no_size() -> None:
    history = RunHistory()
    for name, memory_bytes in (("ann", 4 * 10**9), ("bob", UNLIMITED_BYTES)):
        profile = NodeProfile(memory_bytes=memory_bytes, gflops=1.0)
        history.add_event(on.NodeConnected(1.0, name, profile, PeerAddresses(), "", 0))
    assert [row.text for row in history.events] == [
        "ann connected: 4.0 GB, 1 GFLOP/s on cpu", "bob connected: memory without a limit, 1 GFLOP/s on cpu",
    ]  # fmt: skip
