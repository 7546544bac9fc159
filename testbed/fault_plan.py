"""Parses fault plans: faults of hosts that start at a given progress of a training run, one sentence each.

kill b at microbatch 40                     SIGKILL all processes of b
stop b for 10 s at update 12                SIGSTOP, and SIGCONT after 10 s
cut a-c for 5 s during round 3              drop all packets between a and c
cut c for good at update 20                 drop all packets from and to c
corrupt a frame of b at microbatch 30       flip a bit of what b sends
fill the disk of coordinator at checkpoint 2

Microbatches and updates are counted on the faulty host or, if it holds no stage, on the host with the most; steps are
those of the whole run. A plan has no start times, because they would mean another progress on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from ravnest.core.config import config, require
from ravnest.core.units import parse_seconds

__all__ = ["Action", "PlannedFault", "Progress", "Trigger", "parse_fault", "parse_plan"]

Action = Literal["kill", "stop", "cut", "corrupt", "fill"]
Counter = Literal["microbatch", "update", "step", "round", "checkpoint"]

_SENTENCE = re.compile(
    r"(?P<action>kill|stop|cut|corrupt a frame of|fill the disk of) (?P<hosts>\S+(?: and \S+)?)"
    r"(?: for (?P<duration>good|\S+ ?\S*?))? (?:at|during) (?P<counter>\w+) (?P<number>\d+)"
)
_EXAMPLE = 'write it like "kill b at microbatch 40" or "cut a-c for 5 s during round 3"'


@dataclass(frozen=True)
class Progress:
    """The progress of a training run, per node and in all. Rounds and checkpoints count when they start."""

    microbatches: Mapping[str, int] = field(default_factory=dict)
    updates: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    rounds: int = 0
    checkpoints: int = 0


@config
class Trigger:
    """The progress at which a fault starts: `counter` has reached `number`."""

    counter: Counter
    number: int

    def is_reached(self, progress: Progress, host: str) -> bool:
        counts: Mapping[str, int]
        match self.counter:
            case "microbatch" | "update":
                counts = progress.microbatches if self.counter == "microbatch" else progress.updates
                return counts.get(host, max(counts.values(), default=0)) >= self.number
            case "step":
                return progress.steps >= self.number
            case "round":
                return progress.rounds >= self.number
            case "checkpoint":
                return progress.checkpoints >= self.number


@config
class PlannedFault:
    """A fault and its trigger; a duration of None is for good."""

    action: Action
    hosts: tuple[str, ...]
    trigger: Trigger
    duration_s: float | None = None

    def __post_init__(self) -> None:
        max_hosts, duration_s = 2 if self.action == "cut" else 1, self.duration_s
        require(1 <= len(self.hosts) <= max_hosts, f"only a cut may have two hosts: {self}")
        require(len(set(self.hosts)) == len(self.hosts), f"{self.hosts[0]} is named twice")
        can_end = self.action in ("stop", "cut", "fill")
        require(can_end or duration_s is None, f"a {self.action} has no duration: leave it out")
        require(self.action != "stop" or duration_s is not None, "a stop needs a duration, such as `for 10 s`")
        require(duration_s is None or duration_s > 0, f"the duration of a fault must be > 0 s, got {duration_s} s")

    def __str__(self) -> str:
        duration = "" if self.duration_s is None else f" for {self.duration_s:g} s"
        return f"{self.action} {'-'.join(self.hosts)}{duration} at {self.trigger.counter} {self.trigger.number}"


def parse_fault(text: str, hosts: Sequence[str]) -> PlannedFault:
    """Parse one sentence; `hosts` are the names of all hosts. Raises `ValueError`."""
    match = _SENTENCE.fullmatch(" ".join(text.split()))
    if match is None:
        raise ValueError(f"{text!r} is not a fault: {_EXAMPLE}")
    counter, duration = match["counter"], match["duration"]
    require(counter in get_args(Counter), f"{text!r}: expected one of {', '.join(get_args(Counter))}, got {counter!r}")
    return PlannedFault(
        action=cast("Action", match["action"].split()[0]),
        hosts=_split_hosts(match["hosts"], hosts),
        trigger=Trigger(counter=cast("Counter", counter), number=int(match["number"])),
        duration_s=None if duration in (None, "good") else parse_seconds(duration),
    )


def parse_plan(text: str, hosts: Sequence[str]) -> list[PlannedFault]:
    """Parse sentences separated by line ends or semicolons; a # starts a comment."""
    lines = (line.partition("#")[0].strip() for line in re.split(r"[\n;]", text))
    return [parse_fault(line, hosts) for line in lines if line]


def _split_hosts(text: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """Split `a`, `a and c` or `a-c` into names, which may contain a - of their own."""
    names = [text] if text in hosts else text.split(" and ")
    if len(names) == 1 and text not in hosts:
        parts = text.split("-")
        splits = [("-".join(parts[:i]), "-".join(parts[i:])) for i in range(1, len(parts))]
        names = next((list(pair) for pair in splits if set(pair) <= set(hosts)), names)
    for name in names:
        require(name in hosts, f"there is no host {name!r}; there are {', '.join(hosts)}")
    return tuple(names)
