"""Timelines in the Trace Event Format."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner.fleet import Task
from ravnest.simulator.results import Simulation, timeline
from ravnest.simulator.simulation import Fault, FaultTrace, SimulationSettings, simulate
from tests.unit.simulator.simulated import plan_of, random_task

FIELDS = {
    "X": {"name", "ph", "ts", "dur", "pid", "tid", "cat"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "i": {"name", "ph", "ts", "pid", "tid", "s", "cat"},
}


def simulated(seed: int, record_s: float = 30.0) -> tuple[Task, Simulation]:
    task = random_task(seed, machines=6, num_spares=1, accumulate=2)
    faults = FaultTrace(faults=(Fault(time_s=11.0, kind="leave", machine="m1"),))
    recorded = SimulationSettings(record_s=record_s, step_s=0.05)
    plan = plan_of(task, [["m0", "m1", "m2"], ["m3", "m4"]])
    return task, simulate(task, plan, duration_s=40, faults=faults, settings=recorded, jitter=0.1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_timelines_are_valid_traces(seed: int) -> None:
    """JSON with the fields of each kind, in the order of time, nothing at the same time on one track, all named."""
    events: list[dict[str, Any]] = timeline(simulated(seed)[1])
    assert json.loads(json.dumps(events)) == events
    for event in events:
        assert set(event) - {"args"} == FIELDS[event["ph"]] - {"args"}
        assert event["ts"] >= 0
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(events))
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        assert all(end <= start + 0.002 for (_, end), (start, _) in pairwise(spans)), "rounded to a nanosecond"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) == named
    assert {e["pid"] for e in events} == {e["pid"] for e in events if e["name"] == "process_name"}


def test_actions_and_faults_are_shown() -> None:
    _, simulation = simulated(4)
    events = timeline(simulation)
    spans = [(e["name"], e["cat"]) for e in events if e["ph"] == "X" and e["pid"] == 2]
    for name, kind in [("F0", "forward"), ("B0", "backward"), ("S0", "step"), ("F1", "forward")]:
        assert spans.count((name, kind)) == 2, "once at each of the two stages"
    marks = [e for e in events if e["ph"] == "i"]
    assert (marks[0]["ts"], marks[0]["name"]) == (11e6, "m1 leaves")
    assert len(marks) == 2
    assert max(e["ts"] for e in events if e["ph"] == "X") < 30e6, "no more than was recorded"


def test_counters_follow_the_microbatches() -> None:
    _, simulation = simulated(4)
    period = simulation.clusters[1].periods[0]
    for stage in period.stages:
        for what, most in (("in flight", stage.max_in_flight), ("memory bytes", stage.peak_memory_bytes)):
            counts = [e["args"][what] for e in timeline(simulation) if e["name"] == f"{stage.machine} {what}"]
            assert max(counts) == most
            assert min(counts) >= 0
            assert all(abs(a - b) == 1 for a, b in pairwise(counts)) or what != "in flight"


def test_the_number_of_events_is_limited() -> None:
    _, simulation = simulated(4)
    everything = timeline(simulation)
    few = timeline(simulation, max_events=50)
    assert len([e for e in few if e["ph"] != "M"]) == 50 < len(everything)
    assert not [e for e in timeline(simulated(4, record_s=0.0)[1]) if e["ph"] in "XC"]
    with pytest.raises(ValueError, match="max_events"):
        timeline(simulation, max_events=0)
