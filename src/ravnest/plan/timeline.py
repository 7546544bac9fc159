"""A simulation to look at: its recorded time in the Trace Event Format, for ui.perfetto.dev or chrome://tracing.

    json.dump({"traceEvents": timeline(simulation)}, file)

A cluster is a process. Each of its machines is a track of actions (F12, B12, S3), each line or link a track of the
messages that keep it busy, and each stage has counters: microbatches in flight, and the memory they need. Times are
in microseconds. What happens to machines is marked in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ..core.config import require
from .outcome import ClusterRun, Simulation, Spell

__all__ = ["timeline"]

TraceEvent = dict[str, Any]

_FLEET = 0  # the process of what happens; clusters count from 1


def timeline(simulation: Simulation, *, max_events: int = 200_000) -> list[TraceEvent]:
    """The first events of all clusters, in the order of time, as values that JSON can write."""
    require(max_events >= 1, f"max_events must be at least 1, not {max_events}")
    names = [_named("process_name", "fleet", _FLEET)]
    events: list[TraceEvent] = [
        {"name": h.text, "cat": "fault", "ph": "i", "s": "g", "ts": _us(h.time_s), "pid": _FLEET, "tid": 0}
        for h in simulation.happenings
    ]
    for number, run in enumerate(simulation.clusters, start=1):
        tracks = _Tracks(number)
        events += islice(_cluster(tracks, run), max_events)
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


def _cluster(tracks: _Tracks, run: ClusterRun) -> Iterator[TraceEvent]:
    for spell in run.spells:
        yield from _actions(tracks, spell)
        yield from _messages(tracks, spell)


def _actions(tracks: _Tracks, spell: Spell) -> Iterator[TraceEvent]:
    in_flight = [0] * len(spell.stages)
    for span in spell.actions:
        machine = spell.plan.members[span.stage]
        yield {
            **_complete(str(span.action), span.start_s, span.end_s, tracks.pid, tracks[machine]),
            "cat": span.action.kind,
            "args": {"stage": span.stage, "version": span.action.version},
        }
        if span.action.kind in ("forward", "backward") and span.end_s < spell.end_s:
            in_flight[span.stage] += 1 if span.action.kind == "forward" else -1
            yield from _counters(tracks, spell, span.stage, in_flight[span.stage], span.end_s)


def _counters(tracks: _Tracks, spell: Spell, stage: int, in_flight: int, time_s: float) -> Iterator[TraceEvent]:
    machine = spell.plan.members[stage]
    amounts = {"in flight": in_flight, "memory bytes": spell.stages[stage].memory_bytes[in_flight]}
    for what, amount in amounts.items():
        yield {
            "name": f"{machine} {what}", "ph": "C", "ts": _us(time_s), "pid": tracks.pid, "args": {what: amount},
        }  # fmt: skip


def _messages(tracks: _Tracks, spell: Spell) -> Iterator[TraceEvent]:
    for span in spell.messages:
        track = tracks[spell.channels[span.channel]]
        yield {**_complete(span.name, span.start_s, span.end_s, tracks.pid, track), "cat": "message"}


def _complete(name: str, start_s: float, end_s: float, pid: int, tid: int) -> TraceEvent:
    return {"name": name, "ph": "X", "ts": _us(start_s), "dur": _us(end_s) - _us(start_s), "pid": pid, "tid": tid}


def _named(what: str, name: str, pid: int, tid: int = 0) -> TraceEvent:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
