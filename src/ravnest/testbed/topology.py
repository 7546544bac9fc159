"""What a testbed is made of: hosts, the homes that some of them stand in, and their lines, as one TOML file.

    [[home]]
    name = "anna"
    nat = true               # the default; false: its PCs have public addresses; "symmetric": it cannot be punched

    [[host]]
    name = "anna-1"
    home = "anna"            # left out: a public host
    up = "20 Mbit/s"         # left out: without limit
    down = "100 Mbit/s"
    delay = "20 ms"          # one way, from the host to the middle of the internet
    queue = "100 ms"         # how long packets may wait for the line before they are dropped; the default
    cpu = 0.5                # processors; left out: all
    memory = "1 GB"          # left out: all
    command = "ravnest join --name {name} TICKET"

A packet from a to b takes delay(a) + delay(b). Hosts of one home reach each other over its local network, which has no
limit and no delay. A home may have up, down, delay and queue too: a line that its hosts share, besides their own.
"""

from __future__ import annotations

import ipaddress
import shlex
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from ..core.config import config, parse_bytes, require
from ..core.ids import check_id
from ..core.units import parse_rate, parse_seconds

__all__ = ["Home", "HostSpec", "Line", "Topology"]

_MOST_HOSTS = 200
_PUBLIC = ipaddress.IPv4Address("198.18.0.0")  # a range set aside for testing networks
_LOCAL = ipaddress.IPv4Address("192.168.0.0")

NatKind = Literal["none", "plain", "symmetric"]


@config
class Line:
    """How something is tied to the internet; None: without limit."""

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    delay_s: float = 0.0
    queue_s: float = 0.1

    def __post_init__(self) -> None:
        for rate in (self.up_bytes_per_s, self.down_bytes_per_s):
            require(rate is None or rate >= 1000, "a line carries at least 8 kbit/s; leave it out for no limit")
        require(0 <= self.delay_s <= 10, f"a delay is 0 to 10 s, not {self.delay_s:g} s")
        require(0.001 <= self.queue_s <= 10, f"a queue is 1 ms to 10 s long, not {self.queue_s:g} s")


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
    """One PC: where it stands, its own line, what it may use."""

    name: str
    home: str | None = None
    line: Line = Line()
    cpu: float | None = None
    memory_bytes: int | None = None
    command: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_id(self.name)
        require(self.cpu is None or 0.05 <= self.cpu <= 1024, f"{self.name}: cpu is at least 0.05 processors")
        require(
            self.memory_bytes is None or self.memory_bytes >= 4_000_000,
            f"{self.name}: a process needs at least 4 MB of memory to start",
        )


@config
class Topology:
    """Hosts and homes. Addresses follow from the order, and are the same in every bed."""

    hosts: tuple[HostSpec, ...]
    homes: tuple[Home, ...] = ()

    def __post_init__(self) -> None:
        require(0 < len(self.hosts) <= _MOST_HOSTS, f"a testbed has 1 to {_MOST_HOSTS} hosts, not {len(self.hosts)}")
        for names, what in (([h.name for h in self.hosts], "hosts"), ([h.name for h in self.homes], "homes")):
            twice = sorted({name for name in names if names.count(name) > 1})
            require(not twice, f"two {what} are called {twice[0] if twice else ''!r}; every one needs its own name")
        for host in self.hosts:
            require(
                host.home is None or any(home.name == host.home for home in self.homes),
                f'{host.name}: there is no home {host.home!r}; add [[home]] name = "{host.home}"',
            )

    @classmethod
    def read(cls, path: Path) -> Topology:
        """Read a TOML file. Raises `ValueError` with a sentence."""
        try:
            entries = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
            return cls(
                hosts=tuple(entry.host() for entry in entries.host), homes=tuple(entry.home() for entry in entries.home)
            )
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # not TOML, not of this shape, or a value that cannot be
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
        """The address that the host has itself."""
        home = self.home_of(host)
        if home is None or home.nat == "none":
            return str(_PUBLIC + len(self.homes) + 1 + self._position(host))
        return str(_LOCAL + 256 * (self.homes.index(home) + 1) + 10 + self._position(host))

    def public_address(self, host: str) -> str:
        """The address that the host is seen under by hosts of no home of its own."""
        home = self.home_of(host)
        return self.address(host) if home is None or home.nat == "none" else self.router_address(home.name)

    def router_address(self, home: str) -> str:
        """The public address of a home with a NAT."""
        return str(_PUBLIC + 1 + [h.name for h in self.homes].index(home))

    def _position(self, host: str) -> int:
        return [spec.name for spec in self.hosts].index(host)


# The file as it is written.


class _LineEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    up: str | None = None
    down: str | None = None
    delay: str = "0 ms"
    queue: str = "100 ms"

    def line(self) -> Line:
        return Line(
            up_bytes_per_s=None if self.up is None else parse_rate(self.up),
            down_bytes_per_s=None if self.down is None else parse_rate(self.down),
            delay_s=parse_seconds(self.delay),
            queue_s=parse_seconds(self.queue),
        )


class _HomeEntry(_LineEntry, forbid_unknown_fields=True, kw_only=True):
    nat: bool | Literal["none", "plain", "symmetric"] = True

    def home(self) -> Home:
        kinds: dict[bool, NatKind] = {True: "plain", False: "none"}
        return Home(name=self.name, nat=kinds[self.nat] if isinstance(self.nat, bool) else self.nat, line=self.line())


class _HostEntry(_LineEntry, forbid_unknown_fields=True, kw_only=True):
    home: str | None = None
    cpu: float | None = None
    memory: str | None = None
    command: str | None = None

    def host(self) -> HostSpec:
        return HostSpec(
            name=self.name,
            home=self.home,
            line=self.line(),
            cpu=self.cpu,
            memory_bytes=None if self.memory is None else parse_bytes(self.memory),
            command=None if self.command is None else tuple(shlex.split(self.command)),
        )


class _File(msgspec.Struct, forbid_unknown_fields=True):
    host: list[_HostEntry]
    home: list[_HomeEntry] = []
