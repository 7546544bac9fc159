"""Faults as people write them, and the moments at which they begin and end.

anna-1 5s after 10s            the host's link is cut for 5 seconds, 10 seconds after the start
anna-1 bela-1 5s after 10s     what passes between the two
anna-1 after 10s               for good
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..core.config import config, require
from ..core.units import format_seconds, parse_seconds

__all__ = ["Fault", "FaultKind", "Moment", "moments"]

FaultKind = Literal["cut", "stop", "kill"]
_ENDS = {"cut": "restore", "stop": "cont"}


@config
class Fault:
    """Something that happens to one host, or between two."""

    kind: FaultKind
    hosts: tuple[str, ...]
    start_s: float
    duration_s: float | None = None

    def __post_init__(self) -> None:
        most = 2 if self.kind == "cut" else 1
        require(1 <= len(self.hosts) <= most, f"a {self.kind} has {'one or two hosts' if most == 2 else 'one host'}")
        require(len(set(self.hosts)) == len(self.hosts), f"{self.hosts[0]} is named twice")
        require(self.kind != "kill" or self.duration_s is None, "a kill is for good: leave out how long it lasts")

    @classmethod
    def parse(cls, kind: FaultKind, text: str) -> Fault:
        """`"anna-1 5s after 10s"`."""
        before, separator, after = text.partition(" after ")
        words = before.split()
        require(bool(separator and words), f'--{kind} {text!r}: write it like "anna-1 5s after 10s"')
        duration_s = None
        if len(words) > 1 and words[-1][0].isdigit():
            duration_s = parse_seconds(words.pop())
        return cls(kind=kind, hosts=tuple(words), start_s=parse_seconds(after), duration_s=duration_s)


class Moment(NamedTuple):
    """When to do what to whom: `cut`, `restore`, `stop`, `cont` or `kill`."""

    at_s: float
    do: str
    hosts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.do} {' and '.join(self.hosts)} at {format_seconds(self.at_s)}"


def moments(faults: Sequence[Fault]) -> list[Moment]:
    """The beginnings and ends of all faults, in order."""
    found = [Moment(fault.start_s, fault.kind, fault.hosts) for fault in faults]
    found += [
        Moment(fault.start_s + fault.duration_s, _ENDS[fault.kind], fault.hosts)
        for fault in faults
        if fault.duration_s is not None
    ]
    return sorted(found)
