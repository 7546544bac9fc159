"""Runs two clusters of three PCs and a spare on the testbed, injects faults and waits for recovery."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.recovery.job import END_FILE, Task
from ravnest.cli.target import find_target, get_status
from ravnest.coordinator.status import ClusterStatus, RunStatus
from ravnest.errors import RavnestError
from testbed import HostSpec, Line, Process, Testbed, Topology
from testbed.fault_injector import FaultInjector
from testbed.fault_plan import parse_plan
from testbed.namespaces import enter_network
from testbed.run_monitor import RunFolderMonitor

__all__ = ["CLUSTERS", "HUB", "PCS", "STAGES", "Fleet", "WaitTimeout", "topology"]

HUB = "hub"
STAGES, CLUSTERS = 3, 2
PCS = tuple(f"pc{i}" for i in range(1, STAGES * CLUSTERS + 2))  # one more than the clusters need
_PORT = 7700
_POLL_S, _SLOW_POLL_S = 0.1, 0.5  # slow where speeds are measured: polling takes CPU time too
_STARTING_CPU = 0.6  # as much as the running PCs leave
_TICKET = re.compile(r"rav1-[a-z0-9]+(?=\s)")
_RAVNEST = (sys.executable, "-m", "ravnest")


class WaitTimeout(RuntimeError):
    """A condition was not reached in time."""


def topology() -> Topology:
    line = Line(up_bytes_per_s=12.5e6, down_bytes_per_s=12.5e6, delay_s=0.005)
    pcs = tuple(HostSpec(name=name, line=line) for name in PCS)
    return Topology(hosts=(HostSpec(name=HUB, line=Line(delay_s=0.002)), *pcs))


class Fleet:
    """A training run on a testbed of `topology()`; call `close` before the testbed ends."""

    def __init__(
        self,
        testbed: Testbed,
        folder: Path,
        task: Task,
        options: Sequence[str] = (),
        *,
        num_clusters: int = CLUSTERS,
        cpu: float | None = None,
    ) -> None:
        """`cpu` is the quota of each PC after its start, which would take a minute with a small one."""
        self.testbed, self.folder, self._options, self._cpu = testbed, folder, tuple(options), cpu
        self._num_clusters, self.pcs = num_clusters, PCS[: STAGES * num_clusters + 1]
        self._starting: set[str] = set()
        self.run, self.keys = folder / "run", folder / "keys"
        job = f"from pathlib import Path\nfrom benchmarks.recovery.job import Task, make_job\n\njob = make_job({task!r}, Path({str(folder)!r}))\n"  # noqa: E501
        (folder / "job.py").write_text(job)
        self.monitor = RunFolderMonitor(self.run)
        self.agents: dict[str, Process] = {}
        self.status: RunStatus | None = None
        self.problems: list[str] = []
        self._closing = threading.Event()
        self.start_coordinator()
        self.ticket = self._find_ticket()
        self._poller = threading.Thread(target=self._poll_status, daemon=True)
        self._poller.start()

    def start_coordinator(self, *more: str) -> None:
        command = [*_RAVNEST, "train", str(self.folder / "job.py"), "--listen", f"0.0.0.0:{_PORT}", "--advertise",
                   f"{self.testbed.hosts[HUB].address}:{_PORT}", "--folder",
                   str(self.run), "--coordinator", str(self.keys), "--min-nodes", str(len(self.pcs)), "--min-stages",
                   str(STAGES), "--spares", "1", "--wait", "1s", *self._options, *more]  # fmt: skip
        self.coordinator = self._start(HUB, command)

    def join(self, *hosts: str) -> None:
        for host in hosts:
            command = [sys.executable, "-m", "benchmarks.recovery.agent", self.ticket, host, str(self.folder / host)]
            if self._cpu is not None:
                self.testbed.limit_cpu(host, _STARTING_CPU)
                self._starting.add(host)
            self.agents[host] = self._start(host, command)

    def _start(self, host: str, command: Sequence[str]) -> Process:
        with (self.folder / f"{host}.log").open("a") as log:
            return self.testbed.hosts[host].run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"OMP_NUM_THREADS": "1"}
            )

    def log(self, host: str = HUB) -> str:
        return (self.folder / f"{host}.log").read_text()

    def _find_ticket(self) -> str:
        end_s = time.monotonic() + 120
        while time.monotonic() < end_s and self.coordinator.poll() is None:
            if found := _TICKET.search(self.log()):
                return found[0]
            time.sleep(0.1)
        raise WaitTimeout(f"the coordinator printed no ticket: {self.log()[-2000:]}")

    # status

    def _poll_status(self) -> None:
        """Poll the coordinator's status from a thread that has entered the coordinator's network namespace."""
        enter_network(self.testbed.hosts[HUB].network)
        with asyncio.Runner() as runner:  # one loop for all requests: a cancelled connection takes a while to close
            while not self._closing.wait(_POLL_S if self._cpu is None else _SLOW_POLL_S):
                try:
                    self.status = runner.run(self._get_status())
                except (RavnestError, OSError, ValueError, TimeoutError):
                    continue  # the coordinator is killed or stopped
                self._limit_started(self.status)
                leases = self.status.leases
                if leases.granted != leases.settled + leases.repeated + leases.outstanding + leases.returned:
                    self.problems.append(f"the leases do not balance: {leases}")

    def _limit_started(self, status: RunStatus) -> None:
        for node in status.nodes:
            if node.name in self._starting and node.state not in ("enrolled", "gone") and self._cpu is not None:
                self._starting.discard(node.name)
                self.testbed.limit_cpu(node.name, self._cpu)

    async def _get_status(self) -> RunStatus:
        async with asyncio.timeout(2.0):
            return await get_status(find_target(str(self.keys)))

    def clusters(self) -> list[ClusterStatus]:
        """The clusters that train with all their stages."""
        found = self.status.clusters if self.status is not None else ()
        return [c for c in found if c.phase == "training" and len(c.stages) == STAGES]

    def free(self) -> list[str]:
        return [node.name for node in self.status.nodes if node.state == "free"] if self.status is not None else []

    def is_complete(self) -> bool:
        """Whether all clusters train and a node is free."""
        return len(self.clusters()) == self._num_clusters and bool(self.free())

    def wait_until(
        self, predicate: Callable[[], bool], timeout_s: float, condition: str, injector: FaultInjector | None = None
    ) -> float:
        """Poll until `predicate` holds; returns the seconds it took."""
        start_s = time.monotonic()
        while not predicate():
            if time.monotonic() > start_s + timeout_s:
                raise WaitTimeout(f"{condition}: not reached within {timeout_s:g} s\n{self.log()[-4000:]}")
            if self.coordinator.poll() not in (None, -9):
                raise WaitTimeout(f"the coordinator exited\n{self.log()[-4000:]}")
            if injector is not None:
                injector.poll()
            time.sleep(0.02)
        return time.monotonic() - start_s

    def wait_for_steps(self, steps: int, timeout_s: float, injector: FaultInjector | None = None) -> float:
        """Wait until the fleet is complete and has made `steps` more steps; returns the seconds it took."""
        seconds = self.wait_until(self.is_complete, timeout_s, "a complete fleet", injector)
        target = self.monitor.poll().steps + steps
        return seconds + self.wait_until(
            lambda: self.monitor.poll().steps >= target, timeout_s, f"step {target}", injector
        )

    def settle(self, seconds: float) -> None:
        """Wait until all PCs have started and have their CPU quota, and `seconds` more."""
        self.wait_until(lambda: not self._starting, 60, "CPU quotas of all PCs")
        time.sleep(seconds)

    def inject(self, sentence: str) -> FaultInjector:
        """Wait until a fault has started; poll the returned injector for its end."""
        injector = FaultInjector(self.testbed, parse_plan(sentence, (HUB, *PCS)), self.monitor.poll)
        self.wait_until(lambda: bool(injector.started), 90, f"start of {sentence!r}", injector)
        return injector

    # the end

    def finish(self, timeout_s: float) -> int:
        """End the data; returns the exit code of the run."""
        (self.folder / END_FILE).touch()
        try:
            return self.coordinator.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise WaitTimeout(f"the run did not end within {timeout_s:g} s\n{self.log()[-4000:]}") from None

    def leave(self) -> list[psutil.Process]:
        """Let all agents leave; returns the processes that are still alive afterwards."""
        processes = [
            process for agent in self.agents.values() if agent.poll() is None for process in _process_tree(agent.pid)
        ]
        for agent in self.agents.values():
            agent.send_signal(2)
        for agent in self.agents.values():
            agent.wait(30)
        alive: list[psutil.Process] = psutil.wait_procs(processes, timeout=10)[1]
        return alive

    def close(self) -> None:
        self._closing.set()
        self._poller.join(5)


def _process_tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
