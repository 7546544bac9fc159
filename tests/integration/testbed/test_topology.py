"""Topology files and timed faults: valid ones, and the messages for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

import testbed
from testbed import Home, HostSpec, Line, Topology
from testbed.faults import Fault, FaultKind, schedule

EXAMPLE = Path(testbed.__file__).parent / "home.toml"


def test_the_example() -> None:
    topology = Topology.read(EXAMPLE)
    assert [spec.name for spec in topology.hosts] == ["hub", "anna-1", "anna-2", "bela-1", "bela-2"]
    assert [home.nat for home in topology.homes] == ["plain", "plain"]
    slow = topology.spec("anna-1")
    assert slow.line == Line(up_bytes_per_s=2.5e6, down_bytes_per_s=2.5e6, delay_s=0.04)
    assert (slow.cpu, slow.memory_bytes) == (0.5, 10**9)


def test_every_field(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text("""
        [[home]]
        name = "anna"
        nat = "symmetric"
        up = "10 Mbit/s"
        [[home]]
        name = "open"
        nat = false
        [[host]]
        name = "a"
        home = "anna"
        down = "1 MB/s"
        queue = "50 ms"
        command = "say 'two words' {name}"
    """)
    assert Topology.read(file) == Topology(
        homes=(Home(name="anna", nat="symmetric", line=Line(up_bytes_per_s=1.25e6)), Home(name="open", nat="none")),
        hosts=(
            HostSpec(
                name="a", home="anna", line=Line(down_bytes_per_s=1e6, queue_s=0.05),
                command=("say", "two words", "{name}"),
            ),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "missing required field `host`"),
        ("host = []", "1 to 200 hosts, got 0"),
        ("[[host]]\nname='a'\nupp='1 MB/s'", "unknown field `upp`"),
        ("[[host]]\nname='a'\nup='fast'", "at `$.host[0].up`"),
        ("[[host]]\nname='a'\nup='1 kbit/s'", "at least 8 kbit/s"),
        ("[[host]]\nname='a'\ndelay='20'", "'20' is not a time"),
        ("[[host]]\nname='a'\ndelay='1h'", "delay must be 0 to 10 s, got 3600 s"),
        ("[[host]]\nname='a'\ncpu=0", "at least 0.05 cores"),
        ("[[host]]\nname='a'\nmemory='1 MB'", "at least 4 MB"),
        ("[[host]]\nname='a'\nmemory=7", "expected a string, got 7"),
        ("[[host]]\nname='b'\n[[host]]\nname='a'\nqueue='1h'", "got 3600 s - at `$.host[1]`"),
        ("[[host]]\nname='A b'", "not a valid name"),
        ("[[host]]\nname='a'\n[[host]]\nname='a'", "two hosts are named 'a'"),
        ("[[host]]\nname='a'\nhome='anna'", "no home 'anna'"),
        ("[[host]]\nname='a'\n[[home]]\nname='h'\nnat='full'", "Invalid enum value 'full'"),
        ("[[host", "Expected"),
    ],
)
def test_an_invalid_file_is_rejected_with_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"wrong\.toml: ") as rejected:
        Topology.read(file)
    assert sentence in str(rejected.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Topology.read(tmp_path / "missing.toml")


def test_addresses_are_unique() -> None:
    homes = tuple(Home(name=f"h{i}", nat="none" if i % 3 == 0 else "plain") for i in range(40))
    topology = Topology(homes=homes, hosts=tuple(HostSpec(name=f"p{i}", home=f"h{i % 40}") for i in range(200)))
    names = [spec.name for spec in topology.hosts]
    assert len({topology.address(name) for name in names}) == 200
    assert topology.public_address("p1") == topology.public_address("p41") == topology.router_address("h1")
    assert topology.public_address("p3") == topology.address("p3")
    assert not {topology.address(name) for name in names} & {topology.router_address(home.name) for home in homes}


def test_faults_in_order() -> None:
    faults = [
        Fault.parse("cut", "a b 5s after 10s"),
        Fault.parse("kill", "c after 12 s"),
        Fault.parse("stop", "a 1s after 1s"),
    ]
    assert [str(action) for action in schedule(faults)] == [
        "stop a at 1 s", "resume a at 2 s", "cut a and b at 10 s", "kill c at 12 s", "restore a and b at 15 s",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("cut", "a 5s", 'like "anna-1 5s after 10s"'),
        ("cut", " after 5s", 'like "anna-1 5s after 10s"'),
        ("cut", "a 5x after 5s", "'5x' is not a time"),
        ("cut", "a b c 5s after 5s", "one or two hosts"),
        ("cut", "a a after 5s", "named twice"),
        ("stop", "a b 5s after 5s", "one host"),
        ("kill", "a 5s after 5s", "no duration"),
    ],
)
def test_an_invalid_fault_is_rejected(kind: FaultKind, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Fault.parse(kind, text)
