"""Two clusters of three PCs and a spare on the testbed, to which things happen: started, watched and put right."""

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

from benchmarks.recovery_job import ENOUGH, Task
from ravnest.coordinator.status import ClusterStatus, Status
from ravnest.core.errors import RavnestError
from ravnest.reaching import find_target, get_status
from ravnest.testbed import HostSpec, Line, Process, Testbed, Topology
from ravnest.testbed.faultplan import parse_plan
from ravnest.testbed.inject import Injector
from ravnest.testbed.namespaces import enter_network
from ravnest.testbed.watch import RunWatch

__all__ = ["CLUSTERS", "HUB", "PCS", "STAGES", "Fleet", "Hung", "topology"]

HUB = "hub"
STAGES, CLUSTERS = 3, 2
PCS = tuple(f"pc{i}" for i in range(1, STAGES * CLUSTERS + 2))  # one more than work
_PORT = 7700
_LOOK_S, _LOOK_SELDOM_S = 0.1, 0.5  # seldom where speeds are measured: to look takes a processor too
_STARTING_CPU = 0.6  # with the others at work there is as much left
_TICKET = re.compile(r"rav1-[a-z0-9]+(?=\s)")
_RAVNEST = (sys.executable, "-m", "ravnest")


class Hung(RuntimeError):
    """What was waited for did not come."""


def topology() -> Topology:
    line = Line(up_bytes_per_s=12.5e6, down_bytes_per_s=12.5e6, delay_s=0.005)
    pcs = tuple(HostSpec(name=name, line=line) for name in PCS)
    return Topology(hosts=(HostSpec(name=HUB, line=Line(delay_s=0.002)), *pcs))


class Fleet:
    """Make it in a bed of `topology()`; `close` it before the bed ends."""

    def __init__(
        self, bed: Testbed, folder: Path, task: Task, options: Sequence[str] = (), *, cpu: float | None = None
    ) -> None:
        """`cpu` is what each PC has of a core once it is there: to start with so little would take it a minute."""
        self.bed, self.folder, self._options, self._cpu = bed, folder, tuple(options), cpu
        self._starting: set[str] = set()
        self.run, self.keys = folder / "run", folder / "keys"
        job = f"from pathlib import Path\nfrom benchmarks.recovery_job import Task, make_job\n\njob = make_job({task!r}, Path({str(folder)!r}))\n"  # noqa: E501
        (folder / "job.py").write_text(job)
        self.watch = RunWatch(self.run)
        self.agents: dict[str, Process] = {}
        self.status: Status | None = None
        self.problems: list[str] = []
        self._ending = threading.Event()
        self.start_coordinator()
        self.ticket = self._find_ticket()
        self._watching = threading.Thread(target=self._keep_looking, daemon=True)
        self._watching.start()

    def start_coordinator(self, *more: str) -> None:
        command = [*_RAVNEST, "train", str(self.folder / "job.py"), "--listen", f"0.0.0.0:{_PORT}", "--advertise",
                   f"{self.bed.hosts[HUB].address}:{_PORT}", "--folder",
                   str(self.run), "--coordinator", str(self.keys), "--min-nodes", str(len(PCS)), "--min-stages",
                   str(STAGES), "--spares", "1", "--wait", "1s", *self._options, *more]  # fmt: skip
        self.coordinator = self._start(HUB, command)

    def join(self, *hosts: str) -> None:
        for host in hosts:
            command = [sys.executable, "-m", "benchmarks.recovery_agent", self.ticket, host, str(self.folder / host)]
            if self._cpu is not None:
                self.bed.limit(host, _STARTING_CPU)
                self._starting.add(host)
            self.agents[host] = self._start(host, command)

    def _start(self, host: str, command: Sequence[str]) -> Process:
        with (self.folder / f"{host}.log").open("a") as log:
            return self.bed.hosts[host].run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"OMP_NUM_THREADS": "1"}
            )

    def said(self, host: str = HUB) -> str:
        return (self.folder / f"{host}.log").read_text()

    def _find_ticket(self) -> str:
        end_s = time.monotonic() + 120
        while time.monotonic() < end_s and self.coordinator.poll() is None:
            if found := _TICKET.search(self.said()):
                return found[0]
            time.sleep(0.1)
        raise Hung(f"no ticket: {self.said()[-2000:]}")

    # watching

    def _keep_looking(self) -> None:
        """In a thread that has gone into the coordinator's network: its status, again and again."""
        enter_network(self.bed.hosts[HUB].network)
        with asyncio.Runner() as runner:  # one loop for all: a connection that was given up takes a while to close
            while not self._ending.wait(_LOOK_S if self._cpu is None else _LOOK_SELDOM_S):
                try:
                    self.status = runner.run(self._get())
                except (RavnestError, OSError, ValueError, TimeoutError):
                    continue  # it is being killed, or stands still
                self._limit_those_here(self.status)
                leases = self.status.leases
                if leases.granted != leases.settled + leases.repeated + leases.outstanding + leases.returned:
                    self.problems.append(f"the leases do not balance: {leases}")

    def _limit_those_here(self, status: Status) -> None:
        for node in status.nodes:
            if node.name in self._starting and node.state not in ("enrolled", "gone") and self._cpu is not None:
                self._starting.discard(node.name)
                self.bed.limit(node.name, self._cpu)

    async def _get(self) -> Status:
        async with asyncio.timeout(2.0):
            return await get_status(find_target(str(self.keys)))

    def clusters(self) -> list[ClusterStatus]:
        """Those that train with all their stages."""
        found = self.status.clusters if self.status is not None else ()
        return [c for c in found if c.phase == "training" and len(c.stages) == STAGES]

    def free(self) -> list[str]:
        return [node.name for node in self.status.nodes if node.state == "free"] if self.status is not None else []

    def is_strong(self) -> bool:
        """All clusters train, and somebody is to spare."""
        return len(self.clusters()) == CLUSTERS and bool(self.free())

    def wait_until(
        self, is_so: Callable[[], bool], within_s: float, what: str, injector: Injector | None = None
    ) -> float:
        """How many seconds it took."""
        start_s = time.monotonic()
        while not is_so():
            if time.monotonic() > start_s + within_s:
                raise Hung(f"{what} did not come within {within_s:g} s\n{self.said()[-4000:]}")
            if self.coordinator.poll() not in (None, -9):
                raise Hung(f"the coordinator ended\n{self.said()[-4000:]}")
            if injector is not None:
                injector.look()
            time.sleep(0.02)
        return time.monotonic() - start_s

    def goes_on(self, steps: int, within_s: float, injector: Injector | None = None) -> float:
        """Until both clusters are there, somebody is to spare and so many steps more are done."""
        seconds = self.wait_until(self.is_strong, within_s, "full strength", injector)
        wanted = self.watch.look().steps + steps
        return seconds + self.wait_until(lambda: self.watch.look().steps >= wanted, within_s, "another step", injector)

    def settle(self, seconds: float) -> None:
        """Until nobody has more than its share of a processor any more, as those have who are just starting."""
        self.wait_until(lambda: not self._starting, 60, "everybody's share of a processor")
        time.sleep(seconds)

    def strike(self, sentence: str) -> Injector:
        """Have a fault happen when its moment has come; it may end later, as long as somebody looks."""
        injector = Injector(self.bed, parse_plan(sentence, (HUB, *PCS)), self.watch.look)
        self.wait_until(lambda: bool(injector.begun), 90, f"the moment of {sentence!r}", injector)
        return injector

    # ending

    def finish(self, within_s: float) -> int:
        """No more data: how the run ended."""
        (self.folder / ENOUGH).touch()
        try:
            return self.coordinator.wait(within_s)
        except subprocess.TimeoutExpired:
            raise Hung(f"the run does not end\n{self.said()[-4000:]}") from None

    def leave(self) -> list[psutil.Process]:
        """All agents leave in good order; processes that are still there afterwards."""
        everybody = [one for agent in self.agents.values() if agent.poll() is None for one in _family(agent.pid)]
        for agent in self.agents.values():
            agent.send_signal(2)
        for agent in self.agents.values():
            agent.wait(30)
        left: list[psutil.Process] = psutil.wait_procs(everybody, timeout=10)[1]
        return left

    def close(self) -> None:
        self._ending.set()
        self._watching.join(5)


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
