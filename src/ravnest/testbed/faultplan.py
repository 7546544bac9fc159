"""A fault plan: what befalls whom when a training has come so far, one sentence each.

kill b at microbatch 40                     as if its plug were pulled
stop b for 10 s at update 12                it stands still
cut a-c for 5 s during round 3              nothing passes between the two
cut c for good at update 20                 nothing passes from or to it
corrupt a frame of b at microbatch 30       a bit of what it sends changes on the way
fill the disk of coordinator at checkpoint 2

A microbatch or an update is counted where it befalls somebody, or where most were done if they hold no stage; a step is
one of the whole run. Times are never in a plan: they would mean something else on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from ..core.config import config, require
from ..core.units import parse_seconds

__all__ = ["Act", "PlannedFault", "Progress", "When", "parse_fault", "parse_plan"]

Act = Literal["kill", "stop", "cut", "corrupt", "fill"]
Counted = Literal["microbatch", "update", "step", "round", "checkpoint"]

_SENTENCE = re.compile(
    r"(?P<act>kill|stop|cut|corrupt a frame of|fill the disk of) (?P<who>\S+(?: and \S+)?)"
    r"(?: for (?P<long>good|\S+ ?\S*?))? (?:at|during) (?P<counted>\w+) (?P<number>\d+)"
)
_EXAMPLE = 'write it like "kill b at microbatch 40" or "cut a-c for 5 s during round 3"'


@dataclass(frozen=True)
class Progress:
    """How far a training is: of each node, and of the run. Rounds and checkpoints count when they begin."""

    microbatches: Mapping[str, int] = field(default_factory=dict)
    updates: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    rounds: int = 0
    checkpoints: int = 0


@config
class When:
    """When this many have been counted."""

    counted: Counted
    number: int

    def is_now(self, progress: Progress, who: str) -> bool:
        counts: Mapping[str, int]
        match self.counted:
            case "microbatch" | "update":
                counts = progress.microbatches if self.counted == "microbatch" else progress.updates
                return counts.get(who, max(counts.values(), default=0)) >= self.number
            case "step":
                return progress.steps >= self.number
            case "round":
                return progress.rounds >= self.number
            case "checkpoint":
                return progress.checkpoints >= self.number


@config
class PlannedFault:
    """`for_s` None: for good."""

    act: Act
    hosts: tuple[str, ...]
    when: When
    for_s: float | None = None

    def __post_init__(self) -> None:
        require(
            len(self.hosts) == 1 or (self.act == "cut" and len(self.hosts) == 2), f"only a cut is between two: {self}"
        )
        require(len(set(self.hosts)) == len(self.hosts), f"{self.hosts[0]} is named twice")
        require(
            self.act in ("stop", "cut", "fill") or self.for_s is None, f"a {self.act} does not last: leave out how long"
        )
        require(self.act != "stop" or self.for_s is not None, "a stop lasts for a while: say how long")
        require(self.for_s is None or self.for_s > 0, f"a fault lasts for more than 0 s, not {self.for_s}")

    def __str__(self) -> str:
        long = "" if self.for_s is None else f" for {self.for_s:g} s"
        return f"{self.act} {'-'.join(self.hosts)}{long} at {self.when.counted} {self.when.number}"


def parse_fault(text: str, hosts: Sequence[str]) -> PlannedFault:
    """One sentence; `hosts` are the names that there are. Raises `ValueError`."""
    found = _SENTENCE.fullmatch(" ".join(text.split()))
    require(found is not None, f"{text!r} is no fault: {_EXAMPLE}")
    assert found is not None
    counted, long = found["counted"], found["long"]
    require(counted in get_args(Counted), f"{text!r}: one counts {', '.join(get_args(Counted))}, not {counted!r}")
    act = cast("Act", found["act"].split()[0])
    return PlannedFault(
        act=act,
        hosts=_hosts(found["who"], hosts),
        when=When(counted=cast("Counted", counted), number=int(found["number"])),
        for_s=None if long in (None, "good") else parse_seconds(long),
    )


def parse_plan(text: str, hosts: Sequence[str]) -> list[PlannedFault]:
    """A sentence a line, or with semicolons between; what follows a # is for people."""
    lines = (line.partition("#")[0].strip() for line in re.split(r"[\n;]", text))
    return [parse_fault(line, hosts) for line in lines if line]


def _hosts(who: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """One name, `a and c`, or `a-c`, though names may have a - of their own."""
    names = [who] if who in hosts else who.split(" and ")
    if len(names) == 1 and who not in hosts:
        parts = who.split("-")
        splits = [("-".join(parts[:i]), "-".join(parts[i:])) for i in range(1, len(parts))]
        names = next((list(pair) for pair in splits if set(pair) <= set(hosts)), names)
    for name in names:
        require(name in hosts, f"there is no host {name!r}; there are {', '.join(hosts)}")
    return tuple(names)
