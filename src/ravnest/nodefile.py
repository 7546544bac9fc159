"""A node file: the PCs that might train together, as TOML that their owners can write by hand.

    [fleet]
    far = "40 ms"            # between two regions, one way
    lan = "1 Gbit/s"         # inside a site

    [[node]]
    name = "attic"
    memory = "8 GB"          # that may be used; required
    speed = 41.5             # GFLOP/s of training, as `ravnest profile` prints it; required
    up = "20 Mbit/s"
    down = "100 Mbit/s"
    latency = "12 ms"        # to its region's exchange, one way
    region = "eu"
    site = "home-anna"       # PCs of one site share a local network
    reliability = 0.95       # the chance that it is still there in an hour
    count = 10               # that many alike: attic-1, attic-2, ...

Whatever is wrong is one sentence that names the file, the node and the field.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from .core.config import format_bytes, parse_bytes
from .core.ids import check_id
from .core.units import format_rate, format_seconds, parse_rate, parse_seconds
from .plan.fleet import Fleet, Machine

__all__ = ["NodeFile", "read_nodes"]

T = TypeVar("T")
N = TypeVar("N", int, float)

_MOST_NODES = 100_000
_FIELDS = ("name", "memory", "speed", "up", "down", "latency", "region", "site", "reliability", "count")


@dataclass(frozen=True)
class NodeFile:
    """The machines of a file, their speeds still in GFLOP/s, and what lies between them."""

    machines: tuple[Machine, ...]
    far_s: float
    lan_bytes_per_s: float

    def fleet(self, reference_gflops: float) -> Fleet:
        """The fleet, with speeds relative to a machine of `reference_gflops`."""
        machines = tuple(replace(m, speed=m.speed / reference_gflops) for m in self.machines)
        return Fleet(machines=machines, far_s=self.far_s, lan_bytes_per_s=self.lan_bytes_per_s)


def read_nodes(path: Path) -> NodeFile:
    """Read a node file. Raises `ValueError` with a sentence."""
    content = _Table(str(path), _parsed(path))
    content.allow("fleet", "node")
    fleet = _Table(f"{path}, [fleet]", content.take("fleet", _table, {}))
    fleet.allow("far", "lan")
    listed: Sequence[Mapping[str, Any]] = content.take("node", _tables, [])
    if not listed:
        raise ValueError(f"{path} has no nodes: write [[node]] and below it name, memory and speed")
    machines: list[Machine] = []
    for i, entry in enumerate(listed, start=1):
        machines += _machines(path, i, entry)
        if len(machines) > _MOST_NODES:
            raise ValueError(f"{path} has more than {_MOST_NODES} nodes")
    _no_name_twice(path, machines)
    return NodeFile(
        machines=tuple(machines),
        far_s=fleet.take("far", _latency, 0.04),
        lan_bytes_per_s=fleet.take("lan", _rate, 125e6),
    )


def _parsed(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _machines(path: Path, position: int, entry: Mapping[str, Any]) -> Iterator[Machine]:
    """The machines that one [[node]] stands for."""
    name = entry.get("name")
    table = _Table(f"{path}, node {name!r}" if isinstance(name, str) else f"{path}, node {position}", entry)
    table.allow(*_FIELDS)
    machine = Machine(
        name=table.take("name", _name, f"node-{position}"),
        memory_bytes=table.take("memory", _memory),
        speed=table.take("speed", _gflops),
        up_bytes_per_s=table.take("up", _rate, 2.5e6),
        down_bytes_per_s=table.take("down", _rate, 12.5e6),
        latency_s=table.take("latency", _latency, 0.01),
        region=table.take("region", _text, ""),
        site=table.take("site", _text, ""),
        reliability=table.take("reliability", _reliability, 1.0),
    )
    if "count" not in entry:
        yield machine
        return
    for i in range(table.take("count", _count)):
        yield replace(machine, name=f"{machine.name}-{i + 1}")


def _no_name_twice(path: Path, machines: list[Machine]) -> None:
    seen = set[str]()
    for machine in machines:
        if machine.name in seen:
            raise ValueError(f"{path}: two nodes are called {machine.name!r}; every node needs a name of its own")
        seen.add(machine.name)


class _Table:
    """A table of the file, and the words that say where it is."""

    def __init__(self, where: str, entries: Mapping[str, Any]) -> None:
        self._where, self._entries = where, entries

    def allow(self, *fields: str) -> None:
        """Refuse all fields but these."""
        for found in self._entries:
            if found not in fields:
                close = get_close_matches(found.lower(), fields, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(fields)}"
                raise ValueError(f"{self._where}: unknown field {found!r}; {hint}")

    def take(self, field: str, read: Callable[[Any], T], default: T | None = None) -> T:
        """A field as `read` reads it; without a default it has to be there."""
        if field not in self._entries:
            if default is None:
                raise ValueError(f"{self._where}: {field} is missing, and every node needs memory and speed")
            return default
        try:
            return read(self._entries[field])
        except ValueError as error:
            raise ValueError(f"{self._where}: {field}: {error}") from error


# How a field is read. The limits are what a PC of today could have; beyond them is a slip of the pen.


def _memory(value: Any) -> int:
    return _within(parse_bytes(_with_unit(value, "8 GB")), 16_000_000, 64 * 10**12, format_bytes)


def _gflops(value: Any) -> float:
    return _within(_number(value, "in GFLOP/s, such as 41.5"), 0.001, 1e7, lambda gflops: f"{gflops:g} GFLOP/s")


def _rate(value: Any) -> float:
    return _within(parse_rate(_with_unit(value, "20 Mbit/s")), 125.0, 125e9, format_rate)


def _latency(value: Any) -> float:
    return _within(parse_seconds(_with_unit(value, "12 ms")), 0.0, 10.0, format_seconds)


def _reliability(value: Any) -> float:
    return _within(_number(value, "such as 0.95"), 0.001, 1.0, lambda chance: f"{chance:g}")


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"write a whole number, such as 10, not {value!r:.60}")
    return _within(value, 1, _MOST_NODES, str)


def _name(value: Any) -> str:
    return check_id(_text(value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"write a text in quotes, not {value!r:.60}")
    return value


def _with_unit(value: Any, example: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f'write a number and a unit in quotes, such as "{example}", not {value!r:.60}')
    return value


def _number(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"write a number {what}, not {value!r:.60}")
    return float(value)


def _within(number: N, least: N, most: N, show: Callable[[N], str]) -> N:
    if not least <= number <= most:  # nor is nan
        raise ValueError(f"{show(number)} is not between {show(least)} and {show(most)}")
    return number


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("write it as a table with one pair of brackets, [fleet]")
    return value


def _tables(value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError("write each node below two pairs of brackets, [[node]]")
    return value
