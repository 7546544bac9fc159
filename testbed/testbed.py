"""The testbed itself: hosts to run commands on, and faults to inject into them."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from testbed.capture import Capture
from testbed.forwarder_client import ForwarderClient
from testbed.groups import ControlGroups, Usage
from testbed.process import Process, start_process, wait_until_stopped
from testbed.requirements import TestbedUnavailable, missing
from testbed.topology import HostSpec, Topology

__all__ = ["Host", "Testbed"]

_numbers = itertools.count(1)


class Host:
    """One PC of the testbed."""

    def __init__(self, spec: HostSpec, topology: Topology, forwarder: ForwarderClient, groups: ControlGroups) -> None:
        self.name, self.spec = spec.name, spec
        self.address = topology.address(spec.name)
        self.public_address = topology.public_address(spec.name)
        kinds = {"net": "network", "uts": "uts", "mount": "mounts"}
        self._namespaces = {option: forwarder.namespace(spec.name, kind) for option, kind in kinds.items()}
        self._procs_files = groups.procs_files(spec.name)
        self.processes: list[Process] = []

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **options: Any,
    ) -> Process:
        """Start a command with text streams. `env` is added to our environment, `options` are those of `Popen`."""
        process = start_process(self.name, self._namespaces, self._procs_files, command, env=env, cwd=cwd, **options)
        self.processes.append(process)
        return process

    @property
    def network(self) -> str:
        """A path to the host's network namespace, for `nsenter --net=`."""
        return self._namespaces["net"]


class Testbed:
    """Hosts, lines and NATs, which exist from entering the `with` block to leaving it.

    Raises `TestbedUnavailable` where the machine lacks something.
    """

    __test__ = False  # the name is not for pytest

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.name = ControlGroups.name_for(next(_numbers))
        self.hosts: dict[str, Host] = {}
        self._groups: ControlGroups | None = None
        self._forwarder: ForwarderClient | None = None
        self._captures: list[Capture] = []

    def __enter__(self) -> Testbed:
        if lacking := missing():
            raise TestbedUnavailable(lacking)
        self._groups = ControlGroups(self.name)
        try:
            for spec in self.topology.hosts:
                self._groups.create(spec)
            self._forwarder = ForwarderClient(self.topology, self.name)
        except BaseException:
            self.close()
            raise
        self.hosts = {
            spec.name: Host(spec, self.topology, self._forwarder, self._groups) for spec in self.topology.hosts
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes of all hosts, then remove the hosts. If this is interrupted, the forwarder does it."""
        for capture in self._captures:
            capture.close()
        if self._groups is not None:
            self._groups.remove()
        for host in self.hosts.values():
            for process in host.processes:
                process.close()
        if self._forwarder is not None:
            self._forwarder.close()
        self._groups = self._forwarder = None

    def address(self, host: str) -> str:
        """The host's own address: reachable from its home and, without a NAT, from all hosts."""
        return self.topology.address(host)

    def cut(self, a: str, b: str | None = None) -> None:
        """Silently drop all packets from and to `a`, or all between `a` and `b`."""
        self._request_link("cut", a, b)

    def restore(self, a: str, b: str | None = None) -> None:
        """Undo a cut."""
        self._request_link("restore", a, b)

    def corrupt(self, host: str) -> None:
        """Flip a bit in the next data packet that the host sends, unnoticed by the checksums of IP and TCP."""
        self._running()[0].request("corrupt", host=self._host(host).name)

    def _request_link(self, do: str, a: str, b: str | None) -> None:
        for host in (a,) if b is None else (a, b):
            self.topology.spec(host)  # raises with the names of the hosts if there is no such host
        self._running()[0].request(do, a=a, b=b)

    def kill(self, target: Process | str) -> None:
        """SIGKILL one process, or all processes of a host, as a power failure does."""
        self._signal(target, signal.SIGKILL)

    def stop(self, target: Process | str) -> None:
        """SIGSTOP one process, or all processes of a host; returns when they have stopped."""
        self._signal(target, signal.SIGSTOP)
        wait_until_stopped([target.pid] if isinstance(target, Process) else self._running()[1].processes(target))

    def resume(self, target: Process | str) -> None:
        """SIGCONT: undo `stop`."""
        self._signal(target, signal.SIGCONT)

    def _signal(self, target: Process | str, number: signal.Signals) -> None:
        if isinstance(target, Process):
            target.send_signal(number)
        else:
            self._running()[1].send_signal(self.topology.spec(target).name, number)

    def limit_cpu(self, host: str, cpu: float) -> None:
        """Change the host's CPU quota to `cpu` cores."""
        self._running()[1].create(replace(self.topology.spec(host), cpu=cpu))

    def capture(self, host: str) -> Capture:
        """Start to record all packets that the host sends and receives."""
        capture = Capture(self._host(host).network)
        self._captures.append(capture)
        return capture

    def usage(self, host: str) -> Usage:
        """CPU, memory and traffic of the host since it was created."""
        forwarder, groups = self._running()
        return replace(groups.usage(self._host(host).name), **forwarder.request("traffic", host=host))

    @property
    def forwarder_pid(self) -> int:
        return self._running()[0].pid

    def forwarder_cpu_s(self) -> float:
        """CPU seconds of the forwarder: the testbed's own load on the machine."""
        return float(self._running()[0].request("cpu"))

    def _host(self, name: str) -> Host:
        self._running()
        return self.hosts[self.topology.spec(name).name]

    def _running(self) -> tuple[ForwarderClient, ControlGroups]:
        if self._forwarder is None or self._groups is None:
            raise ValueError("the testbed is not running: use it inside its `with` block")
        return self._forwarder, self._groups
