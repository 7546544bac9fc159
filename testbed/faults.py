"""Faults at set times, as the options of the command line describe them.

anna-1 5s after 10s            cut the host's link for 5 seconds, 10 seconds after the start
anna-1 bela-1 5s after 10s     cut the link between the two hosts
anna-1 after 10s               cut the host's link for good
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ravnest.core.config import config, require
from ravnest.core.units import format_seconds, parse_seconds

__all__ = ["Fault", "FaultKind", "TimedAction", "schedule"]

FaultKind = Literal["cut", "stop", "kill"]
_UNDO = {"cut": "restore", "stop": "resume"}


@config
class Fault:
    """A fault of one host, or of the link between two."""

    kind: FaultKind
    hosts: tuple[str, ...]
    start_s: float
    duration_s: float | None = None

    def __post_init__(self) -> None:
        max_hosts = 2 if self.kind == "cut" else 1
        expected = "one or two hosts" if max_hosts == 2 else "one host"
        require(1 <= len(self.hosts) <= max_hosts, f"--{self.kind} needs {expected}, got {len(self.hosts)}")
        require(len(set(self.hosts)) == len(self.hosts), f"{self.hosts[0]} is named twice")
        require(self.kind != "kill" or self.duration_s is None, "--kill has no duration: leave it out")

    @classmethod
    def parse(cls, kind: FaultKind, text: str) -> Fault:
        """Parse `"anna-1 5s after 10s"`."""
        before, separator, after = text.partition(" after ")
        words = before.split()
        require(bool(separator and words), f'--{kind} {text!r}: write it like "anna-1 5s after 10s"')
        duration_s = None
        if len(words) > 1 and words[-1][0].isdigit():
            duration_s = parse_seconds(words.pop())
        return cls(kind=kind, hosts=tuple(words), start_s=parse_seconds(after), duration_s=duration_s)


class TimedAction(NamedTuple):
    """A method of `Testbed` to call at a time: `cut`, `restore`, `stop`, `resume` or `kill`."""

    at_s: float
    name: str
    hosts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {' and '.join(self.hosts)} at {format_seconds(self.at_s)}"


def schedule(faults: Sequence[Fault]) -> list[TimedAction]:
    """The starts and ends of all faults, in order."""
    actions = [TimedAction(fault.start_s, fault.kind, fault.hosts) for fault in faults]
    actions += [
        TimedAction(fault.start_s + fault.duration_s, _UNDO[fault.kind], fault.hosts)
        for fault in faults
        if fault.duration_s is not None
    ]
    return sorted(actions)
