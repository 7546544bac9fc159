"""Writes the recorded time of a simulation in the Trace Event Format, for ui.perfetto.dev or chrome://tracing.

    json.dump({"traceEvents": timeline(simulation)}, file)

A cluster is a process. Each of its machines is a track of actions (F12, B12, S3), each line or link a track of the
messages that occupy it, and each stage has counters: microbatches in flight, and the memory they need. Times are in
microseconds. Faults and changes of plan are marks in a process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ravnest.core.config import require
from ravnest.simulator.results import Period, SimulatedCluster, Simulation

__all__ = ["timeline"]

TraceEvent = dict[str, Any]

_FLEET = 0  # the process of faults and plans; clusters count from 1


def timeline(simulation: Simulation, *, max_events: int = 200_000) -> list[TraceEvent]:
    """The first events of all clusters in order of time, ready for JSON."""
    require(max_events >= 1, f"max_events must be >= 1, got {max_events}")
    names = [_named("process_name", "fleet", _FLEET)]
    events: list[TraceEvent] = [
        {"name": h.text, "cat": "fault", "ph": "i", "s": "g", "ts": _us(h.time_s), "pid": _FLEET, "tid": 0}
        for h in simulation.events
    ]
    for number, cluster in enumerate(simulation.clusters, start=1):
        tracks = _Tracks(number)
        events += islice(_cluster_events(tracks, cluster), max_events)
        names += tracks.names
    events.sort(key=lambda event: event["ts"])
    return names + events[:max_events]


class _Tracks:
    """The tracks of a cluster, numbered as they appear."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.names = [_named("process_name", f"cluster {pid - 1}", pid)]
        self._numbers: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            self.names.append(_named("thread_name", name, self.pid, self._numbers[name]))
        return self._numbers[name]


def _cluster_events(tracks: _Tracks, cluster: SimulatedCluster) -> Iterator[TraceEvent]:
    for period in cluster.periods:
        yield from _actions(tracks, period)
        yield from _messages(tracks, period)


def _actions(tracks: _Tracks, period: Period) -> Iterator[TraceEvent]:
    in_flight = [0] * len(period.stages)
    for span in period.actions:
        machine = period.plan.members[span.stage]
        yield {
            **_complete(str(span.action), span.start_s, span.end_s, tracks.pid, tracks[machine]),
            "cat": span.action.kind,
            "args": {"stage": span.stage, "version": span.action.version},
        }
        if span.action.kind in ("forward", "backward") and span.end_s < period.end_s:
            in_flight[span.stage] += 1 if span.action.kind == "forward" else -1
            yield from _counters(tracks, period, span.stage, in_flight[span.stage], span.end_s)


def _counters(tracks: _Tracks, period: Period, stage: int, in_flight: int, time_s: float) -> Iterator[TraceEvent]:
    machine = period.plan.members[stage]
    amounts = {"in flight": in_flight, "memory bytes": period.stages[stage].memory_bytes[in_flight]}
    for what, amount in amounts.items():
        yield {
            "name": f"{machine} {what}", "ph": "C", "ts": _us(time_s), "pid": tracks.pid, "args": {what: amount},
        }  # fmt: skip


def _messages(tracks: _Tracks, period: Period) -> Iterator[TraceEvent]:
    for span in period.messages:
        track = tracks[period.channels[span.channel]]
        yield {**_complete(span.name, span.start_s, span.end_s, tracks.pid, track), "cat": "message"}


def _complete(name: str, start_s: float, end_s: float, pid: int, tid: int) -> TraceEvent:
    return {"name": name, "ph": "X", "ts": _us(start_s), "dur": _us(end_s) - _us(start_s), "pid": pid, "tid": tid}


def _named(what: str, name: str, pid: int, tid: int = 0) -> TraceEvent:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
