"""Reads node files: the PCs that may train together, as TOML written by hand.

    [fleet]
    far = "40 ms"            # between two regions, one way
    lan = "1 Gbit/s"         # inside a site

    [[node]]
    name = "attic"
    memory = "8 GB"          # that training may use; required
    speed = 41.5             # GFLOP/s of training, as `ravnest profile` prints it; required
    up = "20 Mbit/s"
    down = "100 Mbit/s"
    latency = "12 ms"        # to its region's exchange, one way
    region = "eu"
    site = "home-anna"       # PCs of one site share a local network
    reliability = 0.95       # the chance that it is still present in an hour
    count = 10               # equal PCs: attic-1, attic-2, ...

Errors are one sentence that names the file, the node, the field and the value.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import msgspec

from ravnest.core.ids import check_id
from ravnest.core.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_rate, parse_seconds
from ravnest.planner.fleet import Fleet, Machine

__all__ = ["NodeFile", "read_nodes"]

_MAX_NODES = 100_000
_TABLES = {"node`": "[[node]], with two pairs of brackets", "fleet`": "[fleet], with one pair of brackets"}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


class _Bytes(float): ...


class _Rate(float): ...


class _Seconds(float): ...


class _Unit(NamedTuple):
    parse: Callable[[str], float]
    format: Callable[[float], str]
    least: float
    most: float
    example: str


_UNITS: dict[type, _Unit] = {  # the limits are those of today's PCs: a value beyond them is a typing error
    _Bytes: _Unit(parse_bytes, format_bytes, 16e6, 64e12, "8 GB"),
    _Rate: _Unit(parse_rate, format_rate, 125.0, 125e9, "20 Mbit/s"),
    _Seconds: _Unit(parse_seconds, format_seconds, 0.0, 10.0, "12 ms"),
}


class _FleetTable(msgspec.Struct, forbid_unknown_fields=True):
    far: _Seconds = _Seconds(0.04)
    lan: _Rate = _Rate(125e6)


class _NodeTable(msgspec.Struct, forbid_unknown_fields=True):
    memory: _Bytes
    speed: Annotated[float, msgspec.Meta(ge=0.001, le=1e7)]
    name: str = ""
    up: _Rate = _Rate(2.5e6)
    down: _Rate = _Rate(12.5e6)
    latency: _Seconds = _Seconds(0.01)
    region: str = ""
    site: str = ""
    reliability: Annotated[float, msgspec.Meta(ge=0.001, le=1.0)] = 1.0
    count: Annotated[int, msgspec.Meta(ge=1, le=_MAX_NODES)] | msgspec.UnsetType = msgspec.UNSET


class _File(msgspec.Struct, forbid_unknown_fields=True):
    fleet: _FleetTable = msgspec.field(default_factory=_FleetTable)
    node: list[_NodeTable] = []


@dataclass(frozen=True)
class NodeFile:
    """The machines of a file, with speeds in GFLOP/s, and the network between them."""

    machines: tuple[Machine, ...]
    far_s: float
    lan_bytes_per_s: float

    def fleet(self, reference_gflops: float) -> Fleet:
        """The fleet, with speeds relative to a machine of `reference_gflops`."""
        machines = tuple(replace(m, speed=m.speed / reference_gflops) for m in self.machines)
        return Fleet(machines=machines, far_s=self.far_s, lan_bytes_per_s=self.lan_bytes_per_s)


def read_nodes(path: Path) -> NodeFile:
    """Read a node file. Raises `ValueError` with one sentence."""
    content = _parse(path)
    try:
        file = msgspec.convert(content, _File, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}{_describe(str(error), content)}") from error
    if not file.node:
        raise ValueError(f"{path} has no nodes: write [[node]] and below it name, memory and speed")
    if sum(1 if node.count is msgspec.UNSET else node.count for node in file.node) > _MAX_NODES:
        raise ValueError(f"{path} must have at most {_MAX_NODES} nodes")
    machines: dict[str, Machine] = {}
    for number, node in enumerate(file.node, start=1):
        try:
            expanded = list(_machines(node, number))
        except ValueError as error:
            raise ValueError(f"{path}, node {node.name!r}: name: {error}") from error
        for machine in expanded:
            if machine.name in machines:
                raise ValueError(f"{path}: two nodes are called {machine.name!r}; give each node its own name")
            machines[machine.name] = machine
    return NodeFile(tuple(machines.values()), far_s=float(file.fleet.far), lan_bytes_per_s=float(file.fleet.lan))


def _parse(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"node file {path} does not exist")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _decode(kind: type, value: object) -> object:
    """A quantity with its unit."""
    unit = _UNITS[kind]
    if not isinstance(value, str):
        raise ValueError(f'expected a number and a unit in quotes, such as "{unit.example}"')
    number = unit.parse(value)
    if not unit.least <= number <= unit.most:
        raise ValueError(f"must be between {unit.format(unit.least)} and {unit.format(unit.most)}")
    return kind(number)


def _machines(node: _NodeTable, number: int) -> Iterator[Machine]:
    """The machines that one [[node]] describes."""
    machine = Machine(
        name=check_id(node.name) if node.name else f"node-{number}",
        memory_bytes=float(node.memory),
        speed=node.speed,
        up_bytes_per_s=float(node.up),
        down_bytes_per_s=float(node.down),
        latency_s=float(node.latency),
        region=node.region,
        site=node.site,
        reliability=node.reliability,
    )
    if node.count is msgspec.UNSET:
        yield machine
        return
    for i in range(1, node.count + 1):
        yield replace(machine, name=f"{machine.name}-{i}")


def _describe(error: str, content: dict[str, Any]) -> str:
    """The message of msgspec with a node's name instead of its index, and the value: `, node 'attic': speed: ...`."""
    message, _, at = error.partition(" - at `$.")
    where, value = "", cast("Any", content)
    for key, index in re.findall(r"(\w+)|\[(\d+)\]", at):
        value = value[int(index) if index else key]
        where += f": {key}"
        if index:
            name = value.get("name") if isinstance(value, dict) else None
            where = f", node {name!r}" if isinstance(name, str) else f", node {int(index) + 1}"
    if unknown := _UNKNOWN.fullmatch(message):
        fields = (_NodeTable if at.startswith("node") else _FleetTable if at else _File).__struct_fields__
        close = get_close_matches(unknown[1].lower(), fields, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(fields)}"
        return f"{where}: unknown field {unknown[1]!r}; {hint}"
    message = message.replace("Object missing required field", "missing field").replace("Expected", "expected")
    if at in _TABLES:
        return f"{where}: expected {_TABLES[at]}"
    return f"{where}: {message.split(', got ')[0]}" + ("" if isinstance(value, dict) else f", got {value!r:.60}")
