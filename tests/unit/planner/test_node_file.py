"""Node files: what is read, and the errors of invalid ones."""

from __future__ import annotations

import re
from contextlib import suppress
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ravnest
from ravnest.core.units import format_rate, format_seconds, parse_rate, parse_seconds
from ravnest.planner.node_file import NodeFile, read_nodes

EXAMPLE = Path(ravnest.__file__).parent / "examples" / "nodes.toml"
GOOD = '[[node]]\nname = "attic"\nmemory = "8 GB"\nspeed = 41.5\n'


def read(tmp_path: Path, text: str) -> NodeFile:
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    return read_nodes(path)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20 Mbit/s", 2.5e6),
        ("2.5 MB/s", 2.5e6),
        ("100mbit/s", 12.5e6),
        ("1 Gbps", 125e6),
        (" 8 bit/s ", 1.0),
        ("3 kB/s", 3000.0),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "20", "20 Mb/s", "20 mb/s", "20 Mbit", "-1 Mbit/s", "nan bit/s", "1e3 MB/s", "1,5 MB/s"]
)
def test_invalid_rates(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a rate: write a number and a unit, such as 20 Mbit/s or 2\.5 MB/s"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("12 ms", 0.012), ("250us", 250e-6), ("1.5 s", 1.5), ("10m", 600.0), ("2 min", 120.0), ("1h", 3600.0)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "12", "-1 s", "12 msec", "s", "inf s"])
def test_invalid_times(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_seconds(text)


@given(st.floats(1e-3, 1e14))
def test_printed_rates_read_back(bytes_per_s: float) -> None:
    assert parse_rate(format_rate(bytes_per_s)) == pytest.approx(bytes_per_s, rel=0.006)


@given(st.floats(1e-6, 1e7))
def test_printed_times_read_back(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.006)


def test_every_field(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '[fleet]\nfar = "55 ms"\nlan = "100 Mbit/s"\n'
        + GOOD
        + 'up = "16 Mbit/s"\ndown = "5 MB/s"\nlatency = "20 ms"\nregion = "eu"\nsite = "home"\nreliability = 0.9\n',
    )
    assert (found.far_s, found.lan_bytes_per_s) == (0.055, 12.5e6)
    (machine,) = found.machines
    assert (machine.name, machine.memory_bytes, machine.speed) == ("attic", 8e9, 41.5)
    assert (machine.up_bytes_per_s, machine.down_bytes_per_s, machine.latency_s) == (2e6, 5e6, 0.02)
    assert (machine.region, machine.site, machine.reliability) == ("eu", "home", 0.9)


def test_defaults(tmp_path: Path) -> None:
    (machine,) = read(tmp_path, '[[node]]\nmemory = "2GiB"\nspeed = 3\n').machines
    assert (machine.name, machine.memory_bytes, machine.speed) == ("node-1", 2**31, 3.0)
    assert (machine.up_bytes_per_s, machine.down_bytes_per_s, machine.latency_s) == (2.5e6, 12.5e6, 0.01)
    assert (machine.region, machine.site, machine.reliability) == ("", "", 1.0)


def test_counted_nodes_get_numbered_names(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD + "count = 3\n" + '[[node]]\nmemory = "4 GB"\nspeed = 9.0\n')
    assert [m.name for m in found.machines] == ["attic-1", "attic-2", "attic-3", "node-2"]
    assert [m.speed for m in found.machines] == [41.5, 41.5, 41.5, 9.0]


def test_speeds_are_relative_to_the_machine_that_measured(tmp_path: Path) -> None:
    fleet = read(tmp_path, '[fleet]\nfar = "55 ms"\n' + GOOD).fleet(reference_gflops=20.75)
    assert fleet["attic"].speed == 2.0
    assert fleet.far_s == 0.055


def test_the_example_is_twelve_uneven_pcs() -> None:
    machines = read_nodes(EXAMPLE).machines
    assert len(machines) == 12
    assert len({m.speed for m in machines}) >= 8
    assert all(m.memory_bytes < inf and m.reliability < 1 for m in machines)


NODE = "nodes.toml, node 'attic': "
BAD: dict[str, tuple[str, str]] = {
    "empty": ("", "nodes.toml has no nodes: write [[node]]"),
    "only a fleet": ('[fleet]\nfar = "40 ms"\n', "nodes.toml has no nodes"),
    "not TOML": ("[[node]\n", "nodes.toml is not TOML: "),
    "one pair of brackets": (GOOD.replace("[[node]]", "[node]"), "node: expected [[node]], with two"),
    "fleet as a list": ("[[fleet]]\n" + GOOD, "nodes.toml: fleet: expected [fleet], with one pair of brackets"),
    "unknown table": (GOOD.replace("node]", "nodes]"), "unknown field 'nodes'; did you mean 'node'?"),
    "unknown field": (GOOD + "memroy = 1\n", NODE + "unknown field 'memroy'; did you mean 'memory'?"),
    "strange field": (GOOD + "colour = 1\n", NODE + "unknown field 'colour'; there are memory, speed, name,"),
    "unknown in fleet": ("[fleet]\nfare = 1\n" + GOOD, "nodes.toml: fleet: unknown field 'fare'; did you mean 'far'?"),
    "no memory": ('[[node]]\nname = "attic"\nspeed = 4\n', NODE + "missing field `memory`"),
    "no speed": ('[[node]]\nmemory = "8 GB"\n', "nodes.toml, node 1: missing field `speed`"),
    "memory as a number": (GOOD.replace('"8 GB"', "8"), NODE + 'memory: expected a number and a unit in quotes'),
    "negative memory": (GOOD.replace("8 GB", "-8 GB"), NODE + "memory: '-8 GB' is not a size"),
    "a petabyte": (GOOD.replace("8 GB", "1000 TB"), NODE + "memory: must be between 16.0 MB and 64.0 TB, got '1000"),
    "eight bytes": (GOOD.replace("8 GB", "8"), NODE + "memory: must be between 16.0 MB and 64.0 TB, got '8'"),
    "speed as a text": (GOOD.replace("41.5", '"fast"'), NODE + "speed: expected `float`, got 'fast'"),
    "speed true": (GOOD.replace("41.5", "true"), NODE + "speed: expected `float`, got True"),
    "negative speed": (GOOD.replace("41.5", "-1"), NODE + "speed: expected `float` >= 0.001, got -1"),
    "speed 0": (GOOD.replace("41.5", "0"), NODE + "speed: expected `float` >= 0.001, got 0"),
    "an exaflop": (GOOD.replace("41.5", "1e9"), NODE + "speed: expected `float` <= 10000000.0, got 1000000000.0"),
    "speed nan": (GOOD.replace("41.5", "nan"), NODE + "speed: expected `float` >= 0.001, got nan"),
    "bandwidth 0": (GOOD + 'up = "0 Mbit/s"\n', NODE + "up: must be between 1 kbit/s and 1 Tbit/s, got '0 Mbit/s'"),
    "bandwidth without a unit": (GOOD + 'down = "100"\n', NODE + "down: '100' is not a rate"),
    "bandwidth as a number": (GOOD + "down = 100\n", NODE + 'down: expected a number and a unit in quotes'),
    "long latency": (GOOD + 'latency = "100 s"\n', NODE + "latency: must be between 0 ms and 10 s, got '100 s'"),
    "negative latency": (GOOD + 'latency = "-1 ms"\n', NODE + "latency: '-1 ms' is not a time"),
    "reliability above 1": (GOOD + "reliability = 1.5\n", NODE + "reliability: expected `float` <= 1.0, got 1.5"),
    "reliability 0": (GOOD + "reliability = 0\n", NODE + "reliability: expected `float` >= 0.001, got 0"),
    "region as a number": (GOOD + "region = 7\n", NODE + "region: expected `str`, got 7"),
    "count 0": (GOOD + "count = 0\n", NODE + "count: expected `int` >= 1, got 0"),
    "count 1.5": (GOOD + "count = 1.5\n", NODE + "count: expected `int`, got 1.5"),
    "too many": (GOOD + "count = 100000\n" + GOOD.replace("attic", "cellar"), "must have at most 100000 nodes"),
    "two of one name": (GOOD + GOOD, "nodes.toml: two nodes are called 'attic'"),
    "two of one name by counting": (GOOD + "count = 2\n" + GOOD.replace("attic", "attic-2"), "are called 'attic-2'"),
    "an invalid name": (GOOD.replace("attic", "../x"), "node '../x': name: '../x' is not a valid name"),
    "name as a number": (GOOD.replace('"attic"', "3"), "node 1: name: expected `str`, got 3"),
    "far as a number": ("[fleet]\nfar = 40\n" + GOOD, "nodes.toml: fleet: far: expected a number and a unit in quotes"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_an_error_is_one_sentence(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(tmp_path, text)
    sentence = str(caught.value)
    assert "nodes.toml" in sentence
    assert "\n" not in sentence


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_nodes(tmp_path / "nowhere.toml")
    with pytest.raises(ValueError, match="does not exist"):
        read_nodes(tmp_path)
    (tmp_path / "nodes.toml").write_bytes(b"\xff\xfe[[node]]")
    with pytest.raises(ValueError, match=r"nodes\.toml is not TOML: .*decode"):
        read_nodes(tmp_path / "nodes.toml")


@given(st.text(max_size=200))
def test_any_text_is_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(GOOD + text, encoding="utf-8", errors="replace")
    with suppress(ValueError):
        assert read_nodes(path).machines[0].memory_bytes == 8e9
