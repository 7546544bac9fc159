"""Simulates the pipeline of one cluster: the schedule of the workers at every stage, and messages that take time.

A stage does one action at a time, chosen by its `PipelineSchedule`; an event is the end of an action or the arrival of
a message.

A message passes channels: its sender's upload, the pair's own limit, its receiver's download. Each serves in
order of arrival, at its own rate, and forwards while it receives, so that a message alone takes

    latency + max over its channels of bytes / rate

and a channel is busy for the sum of bytes / rate of all messages that share it. Queues are unbounded here. In a run
they hold a few messages, and a full one blocks the stage before a link; then that link is the bottleneck, and stays
busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from ravnest.core.schedule import Action, Kind, PipelineSchedule

__all__ = ["ActionSpan", "Hop", "MessageSpan", "PipelineSimulation", "Route"]

_INPUT, _GRADIENT = object(), object()
_NEVER = -inf


class Hop(NamedTuple):
    """A channel that a message passes, and the seconds for which the message occupies it."""

    channel: int
    seconds: float


class Route(NamedTuple):
    """The path of a message from a stage to a neighbour."""

    hops: tuple[Hop, ...] = ()
    latency_s: float = 0.0


class Mark(NamedTuple):
    """An optimizer step of the first stage: its time, its number, and the seconds that each stage had worked."""

    time_s: float
    updates: int
    busy_s: tuple[float, ...]


class ActionSpan(NamedTuple):
    """An action of a stage."""

    stage: int
    start_s: float
    end_s: float
    action: Action


class MessageSpan(NamedTuple):
    """A message on a channel: `F12` forward, `B12` backward."""

    channel: int
    start_s: float
    end_s: float
    name: str


class _Moving(NamedTuple):
    """A message that waits for its next channel."""

    route: int
    number: int
    hop: int
    end_s: float  # when all of it has passed the channels before


class PipelineSimulation:
    """Stages in a row. Stage j sends to the next over route 2 j, and to the previous over route 2 j - 1."""

    def __init__(
        self,
        schedules: Sequence[PipelineSchedule],
        seconds: Sequence[Mapping[Kind, float]],
        routes: Sequence[Route],
        *,
        start_s: float = 0.0,
        bucket_s: float = inf,
        record_until_s: float = _NEVER,
        vary: Callable[[], float] | None = None,
    ) -> None:
        """`vary` returns a factor for every duration. Messages are counted in buckets of time, from 0 on."""
        self.schedules = list(schedules)
        self.routes = list(routes)
        self.start_s = self.now_s = start_s
        self.busy_s = [0.0] * len(self.schedules)
        self.max_in_flight = [0] * len(self.schedules)
        self.sent = [[0] for _ in self.routes]  # messages per bucket
        self.warm: Mark | None = None  # the step after which the pipeline counts as full
        self.last: Mark | None = None
        self.actions: list[ActionSpan] = []
        self.messages: list[MessageSpan] = []
        self._seconds = list(seconds)
        self._current: list[Action | None] = [None] * len(self.schedules)
        self._until_s = [start_s] * len(self.schedules)
        self._free_s = [start_s] * (1 + max((hop.channel for r in self.routes for hop in r.hops), default=0))
        rule = self.schedules[0].rule
        self._warm_updates = max(2, -(-2 * rule.depth // rule.accumulate))
        self._events: list[tuple[float, int, int, object]] = []
        self._order = count()
        self._bucket_s, self._record_until_s, self._vary = bucket_s, record_until_s, vary
        self.schedules[0].input_arrived()
        self._begin(start_s, 0)

    @property
    def fed(self) -> int:
        """Microbatches that the first stage has begun."""
        current = self._current[0]
        return self.schedules[0].forwards + (current is not None and current.kind == "forward")

    @property
    def trained(self) -> int:
        """Microbatches whose step the first stage, always the last to do it, has done."""
        return self.schedules[0].updates * self.schedules[0].rule.accumulate

    @property
    def steady(self) -> tuple[int, float]:
        """Steps of the first stage from a full pipeline to the last one, and their seconds; 0 if too few."""
        if self.warm is None or self.last is None:
            return 0, 0.0
        return self.last.updates - self.warm.updates, self.last.time_s - self.warm.time_s

    def steady_busy_s(self, stage: int) -> float:
        """Seconds that a stage worked in the steady time."""
        return self.last.busy_s[stage] - self.warm.busy_s[stage] if self.warm and self.last else 0.0

    @property
    def ended(self) -> bool:
        """Whether no event is left: all that may be fed is trained."""
        return not self._events

    def set_seconds(self, stage: int, seconds: Mapping[Kind, float]) -> None:
        """Set the durations of a stage's actions, from its next one on."""
        self._seconds[stage] = seconds

    def drain(self) -> None:
        """Feed no more than completes the optimizer step that has begun."""
        accumulate = self.schedules[0].rule.accumulate
        last = -(-self.fed // accumulate)
        for schedule in self.schedules:
            schedule.end = last if schedule.end is None else min(last, schedule.end)

    def worked_s(self, now_s: float) -> tuple[float, ...]:
        """Seconds that each stage has worked until now, part of an action included."""
        return tuple([b - (u - now_s if u > now_s else 0.0) for b, u in zip(self.busy_s, self._until_s, strict=True)])

    def run(self, until_s: float) -> None:
        """Process events until then, or until none is left."""
        events, schedules, current = self._events, self.schedules, self._current
        while events and events[0][0] <= until_s:
            now_s, _, stage, event = heappop(events)
            if event is _INPUT:
                schedules[stage].input_arrived()
            elif event is _GRADIENT:
                schedules[stage].gradient_arrived()
            elif isinstance(event, Action):
                self._finish(now_s, stage, event)
            else:
                assert isinstance(event, _Moving)
                self._move(now_s, event)
                continue
            self.now_s = now_s
            if current[stage] is None:
                self._begin(now_s, stage)
        if until_s < inf:
            self.now_s = until_s

    def _begin(self, now_s: float, stage: int) -> None:
        action = self.schedules[stage].next()
        if action.kind == "wait":
            return
        seconds = self._seconds[stage][action.kind]
        if self._vary is not None:
            seconds *= self._vary()
        end_s = now_s + seconds
        self._current[stage] = action
        self._until_s[stage] = end_s
        self.busy_s[stage] += seconds
        heappush(self._events, (end_s, next(self._order), stage, action))
        if now_s < self._record_until_s:
            self.actions.append(ActionSpan(stage, now_s, end_s, action))

    def _finish(self, now_s: float, stage: int, action: Action) -> None:
        schedule = self.schedules[stage]
        schedule.done(action)
        self._current[stage] = None
        if action.kind == "forward":
            in_flight = schedule.forwards - schedule.backwards
            if in_flight > self.max_in_flight[stage]:
                self.max_in_flight[stage] = in_flight
            if stage == 0:
                schedule.input_arrived()  # the data is endless
            if not schedule.is_last_stage:
                self._send(now_s, 2 * stage, action.number)
        elif action.kind == "backward":
            if stage:
                self._send(now_s, 2 * stage - 1, action.number)
        elif stage == 0:
            self.last = Mark(now_s, schedule.updates, self.worked_s(now_s))
            if schedule.updates == self._warm_updates:
                self.warm = self.last

    def _send(self, now_s: float, route: int, number: int) -> None:
        sent, bucket = self.sent[route], int(now_s / self._bucket_s)
        while len(sent) <= bucket:
            sent.append(0)
        sent[bucket] += 1
        self._move(now_s, _Moving(route, number, 0, now_s))

    def _move(self, now_s: float, message: _Moving) -> None:
        """Pass a message through its channels, up to the next one that is busy."""
        route, number, passed, end_s = message
        hops, latency_s = self.routes[route]
        while passed < len(hops):
            channel, seconds = hops[passed]
            passed += 1
            if self._vary is not None:
                seconds *= self._vary()
            start_s = self._free_s[channel]
            if start_s < now_s:
                start_s = now_s
            free_s = self._free_s[channel] = start_s + seconds
            if free_s > end_s:
                end_s = free_s
            if start_s < self._record_until_s:
                self.messages.append(MessageSpan(channel, start_s, free_s, f"{'FB'[route % 2]}{number}"))
            if start_s > now_s and passed < len(hops):
                heappush(self._events, (start_s, next(self._order), 0, _Moving(route, number, passed, end_s)))
                return
        if route % 2:
            heappush(self._events, (end_s + latency_s, next(self._order), route // 2, _GRADIENT))
        else:
            heappush(self._events, (end_s + latency_s, next(self._order), route // 2 + 1, _INPUT))
