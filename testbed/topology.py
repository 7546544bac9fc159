"""The topology of a testbed: hosts, the homes that some of them belong to, and their access lines, as one TOML file.

    [[home]]
    name = "anna"
    nat = true               # default; false: public addresses; "symmetric": hole punching fails

    [[host]]
    name = "anna-1"
    home = "anna"            # default: a public host
    up = "20 Mbit/s"         # default: no limit
    down = "100 Mbit/s"
    delay = "20 ms"          # one way, from the host to the middle of the internet
    queue = "100 ms"         # packets that would wait longer for the line are dropped; default
    cpu = 0.5                # cores; default: all
    memory = "1 GB"          # default: all
    command = "ravnest join --name {name} TICKET"

A packet from a to b takes delay(a) + delay(b). Hosts of one home reach each other over its local network, which has no
limit and no delay. A home may have up, down, delay and queue too: a line shared by its hosts, in addition to theirs.
"""

from __future__ import annotations

import ipaddress
import shlex
from pathlib import Path
from typing import Any, Literal

import msgspec

from ravnest.core.config import config, require
from ravnest.core.ids import check_id
from ravnest.core.units import parse_bytes, parse_rate, parse_seconds

__all__ = ["Home", "HostSpec", "Line", "Topology"]

_MAX_HOSTS = 200
_PUBLIC = ipaddress.IPv4Address("198.18.0.0")  # a range reserved for network tests (RFC 2544)
_LOCAL = ipaddress.IPv4Address("192.168.0.0")

NatKind = Literal["none", "plain", "symmetric"]


@config
class Line:
    """The access line of a host or a home; a rate of None is unlimited."""

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    delay_s: float = 0.0
    queue_s: float = 0.1

    def __post_init__(self) -> None:
        for rate in (self.up_bytes_per_s, self.down_bytes_per_s):
            require(rate is None or rate >= 1000, "a rate must be at least 8 kbit/s; leave it out for no limit")
        require(0 <= self.delay_s <= 10, f"delay must be 0 to 10 s, got {self.delay_s:g} s")
        require(0.001 <= self.queue_s <= 10, f"queue must be 1 ms to 10 s, got {self.queue_s:g} s")


@config
class Home:
    """A local network behind one router."""

    name: str
    nat: NatKind = "plain"
    line: Line = Line()

    def __post_init__(self) -> None:
        check_id(self.name)


@config
class HostSpec:
    """One PC: its home, its own line and its limits."""

    name: str
    home: str | None = None
    line: Line = Line()
    cpu: float | None = None
    memory_bytes: int | None = None
    command: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_id(self.name)
        require(self.cpu is None or 0.05 <= self.cpu <= 1024, f"cpu must be at least 0.05 cores, got {self.cpu}")
        require(
            self.memory_bytes is None or self.memory_bytes >= 4_000_000,
            f"memory must be at least 4 MB for a process to start, got {self.memory_bytes} bytes",
        )


@config
class Topology:
    """Hosts and homes. Addresses follow from the order and are the same in every testbed."""

    hosts: tuple[HostSpec, ...]
    homes: tuple[Home, ...] = ()

    def __post_init__(self) -> None:
        require(
            0 < len(self.hosts) <= _MAX_HOSTS, f"a topology must have 1 to {_MAX_HOSTS} hosts, got {len(self.hosts)}"
        )
        for names, kind in (([h.name for h in self.hosts], "hosts"), ([h.name for h in self.homes], "homes")):
            duplicates = [name for name in names if names.count(name) > 1]
            require(not duplicates, f"two {kind} are named {''.join(duplicates[:1])!r}; names must be unique")
        for host in self.hosts:
            require(
                host.home is None or any(home.name == host.home for home in self.homes),
                f'{host.name}: there is no home {host.home!r}; add [[home]] name = "{host.home}"',
            )

    @classmethod
    def read(cls, path: Path) -> Topology:
        """Read a TOML file. Raises `ValueError` with one sentence."""
        try:
            file = msgspec.toml.decode(path.read_bytes(), type=_File, dec_hook=_parse_unit)
            return cls(hosts=tuple(entry.spec() for entry in file.host), homes=tuple(e.spec() for e in file.home))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # not TOML, an unknown field or an invalid value
            raise ValueError(f"{path}: {error}") from error

    def spec(self, host: str) -> HostSpec:
        for spec in self.hosts:
            if spec.name == host:
                return spec
        raise ValueError(f"there is no host {host!r}; there are {', '.join(spec.name for spec in self.hosts)}")

    def home_of(self, host: str) -> Home | None:
        name = self.spec(host).home
        return next((home for home in self.homes if home.name == name), None)

    def address(self, host: str) -> str:
        """The host's own address."""
        home = self.home_of(host)
        position = [spec.name for spec in self.hosts].index(host)
        if home is None or home.nat == "none":
            return str(_PUBLIC + len(self.homes) + 1 + position)
        return str(_LOCAL + 256 * (self.homes.index(home) + 1) + 10 + position)

    def public_address(self, host: str) -> str:
        """The address under which hosts outside of its home see the host."""
        home = self.home_of(host)
        return self.address(host) if home is None or home.nat == "none" else self.router_address(home.name)

    def router_address(self, home: str) -> str:
        """The public address of a home with a NAT."""
        return str(_PUBLIC + 1 + [h.name for h in self.homes].index(home))


# The TOML file. A `spec` is built during decoding too, so that its errors carry the path of the entry.


class _Rate(float): ...


class _Seconds(float): ...


class _Bytes(int): ...


class _Words(tuple[str, ...]): ...


def _parse_unit(kind: type[Any], value: object) -> Any:
    parsers: dict[type, Any] = {_Rate: parse_rate, _Seconds: parse_seconds, _Bytes: parse_bytes, _Words: shlex.split}
    require(isinstance(value, str), f"expected a string, got {value!r}")
    return kind(parsers[kind](value))


class _Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    up: _Rate | None = None
    down: _Rate | None = None
    delay: _Seconds = _Seconds(0.0)
    queue: _Seconds = _Seconds(0.1)

    def __post_init__(self) -> None:
        self.spec()

    def spec(self) -> Home | HostSpec:
        raise NotImplementedError

    def line(self) -> Line:
        up, down = (None if rate is None else float(rate) for rate in (self.up, self.down))
        return Line(up_bytes_per_s=up, down_bytes_per_s=down, delay_s=float(self.delay), queue_s=float(self.queue))


class _HomeEntry(_Entry, forbid_unknown_fields=True, kw_only=True):
    nat: bool | NatKind = True

    def spec(self) -> Home:
        nat: NatKind = ("plain" if self.nat else "none") if isinstance(self.nat, bool) else self.nat
        return Home(name=self.name, nat=nat, line=self.line())


class _HostEntry(_Entry, forbid_unknown_fields=True, kw_only=True):
    home: str | None = None
    cpu: float | None = None
    memory: _Bytes | None = None
    command: _Words | None = None

    def spec(self) -> HostSpec:
        return HostSpec(
            name=self.name, home=self.home, line=self.line(), cpu=self.cpu, command=self.command,
            memory_bytes=None if self.memory is None else int(self.memory),
        )  # fmt: skip


class _File(msgspec.Struct, forbid_unknown_fields=True):
    host: list[_HostEntry]
    home: list[_HomeEntry] = []
