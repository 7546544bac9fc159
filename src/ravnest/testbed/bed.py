"""The testbed: hosts to run commands on, and the faults of the real world at will."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from .capture import Capture
from .groups import Groups, Usage
from .internet import Internet
from .needs import TestbedRefused, missing
from .process import Process, await_standstill, run_in
from .topology import HostSpec, Topology

__all__ = ["Host", "Testbed"]

_numbers = itertools.count(1)


class Host:
    """One PC of the bed."""

    def __init__(self, spec: HostSpec, topology: Topology, internet: Internet, groups: Groups) -> None:
        self.name, self.spec = spec.name, spec
        self.address = topology.address(spec.name)
        self.public_address = topology.public_address(spec.name)
        kinds = {"net": "network", "uts": "names", "mount": "mounts"}
        self._namespaces = {option: internet.namespace(spec.name, kind) for option, kind in kinds.items()}
        self._joining = groups.joining(spec.name)
        self.processes: list[Process] = []

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> Process:
        """Start a command here; it reads and writes text. `env` is added to ours, `options` are those of `Popen`."""
        started = run_in(self.name, self._namespaces, self._joining, command, env=env, cwd=cwd, **options)
        self.processes.append(started)
        return started

    @property
    def network(self) -> str:
        """A path to the host's network namespace, for `nsenter --net=`."""
        return self._namespaces["net"]


class Testbed:
    """Hosts, lines and NATs from entering its `with` block to leaving it, whatever the reason.

    Raises `TestbedRefused` where the machine lacks something.
    """

    __test__ = False  # the name is not for pytest

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.name = Groups.name_for(next(_numbers))
        self.hosts: dict[str, Host] = {}
        self._groups: Groups | None = None
        self._internet: Internet | None = None
        self._captures: list[Capture] = []

    def __enter__(self) -> Testbed:
        lacking = missing()
        if lacking:
            raise TestbedRefused(f"this machine cannot have a testbed, it lacks {'; '.join(lacking)}")
        self._groups = Groups(self.name)
        try:
            for spec in self.topology.hosts:
                self._groups.make(spec)
            self._internet = Internet(self.topology, self.name)
        except BaseException:
            self.close()
            raise
        self.hosts = {
            spec.name: Host(spec, self.topology, self._internet, self._groups) for spec in self.topology.hosts
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of all hosts, then the hosts. If this is cut short, the forwarder does it."""
        for capture in self._captures:
            capture.close()
        if self._groups is not None:
            self._groups.remove()
        for host in self.hosts.values():
            for process in host.processes:
                process.close()
        if self._internet is not None:
            self._internet.close()
        self._groups = self._internet = None

    def address(self, host: str) -> str:
        """The address that the host has itself, by which its home and, without a NAT, everybody reaches it."""
        return self.topology.address(host)

    def cut(self, a: str, b: str | None = None) -> None:
        """Lose, without a word to anybody, all packets from and to `a`, or all between `a` and `b`."""
        self._ask_about("cut", a, b)

    def restore(self, a: str, b: str | None = None) -> None:
        """End a cut."""
        self._ask_about("restore", a, b)

    def corrupt(self, host: str) -> None:
        """Change a bit in the next packet with data that the host sends, as no checksum of the network notices."""
        self._running()[0].ask("corrupt", host=self._host(host).name)

    def _ask_about(self, do: str, a: str, b: str | None) -> None:
        for host in (a,) if b is None else (a, b):
            self.topology.spec(host)  # says which hosts there are, if this is none
        self._running()[0].ask(do, a=a, b=b)

    def kill(self, what: Process | str) -> None:
        """SIGKILL for a process alone, or for all that runs on a host, as if its plug were pulled."""
        self._signal(what, signal.SIGKILL)

    def stop(self, what: Process | str) -> None:
        """SIGSTOP: the process, or all of a host, stands still when this returns."""
        self._signal(what, signal.SIGSTOP)
        await_standstill([what.pid] if isinstance(what, Process) else self._running()[1].processes(what))

    def cont(self, what: Process | str) -> None:
        """SIGCONT: goes on after `stop`."""
        self._signal(what, signal.SIGCONT)

    def _signal(self, what: Process | str, number: signal.Signals) -> None:
        if isinstance(what, Process):
            what.send_signal(number)
        else:
            self._running()[1].send_signal(self.topology.spec(what).name, number)

    def limit(self, host: str, cpu: float) -> None:
        """From now on the host has so many processors, or a part of one."""
        self._running()[1].make(replace(self.topology.spec(host), cpu=cpu))

    def capture(self, host: str) -> Capture:
        """Record all that passes the host's link from now on."""
        capture = Capture(self._host(host).network)
        self._captures.append(capture)
        return capture

    def usage(self, host: str) -> Usage:
        """What the host has used so far."""
        internet, groups = self._running()
        return replace(groups.usage(self._host(host).name), **internet.ask("traffic", host=host))

    @property
    def forwarder_pid(self) -> int:
        return self._running()[0].pid

    def forwarder_cpu_s(self) -> float:
        """What the testbed itself took of the machine: the processor seconds of its forwarder."""
        return float(self._running()[0].ask("cpu"))

    def _host(self, name: str) -> Host:
        self._running()
        return self.hosts[self.topology.spec(name).name]

    def _running(self) -> tuple[Internet, Groups]:
        if self._internet is None or self._groups is None:
            raise ValueError("the testbed is not running: use it inside its `with` block")
        return self._internet, self._groups
