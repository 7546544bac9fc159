"""`ravnest testbed` as a person asks for it: commands on hosts, what they print, and faults at set times."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from pathlib import Path

import rich.table
from rich.console import Console

from ..core.config import config, format_bytes, require
from ..core.units import format_rate, format_seconds, parse_seconds
from .bed import Testbed
from .faults import Fault, FaultKind, Moment, moments
from .leftovers import clean
from .lines import Lines
from .needs import TestbedRefused, missing
from .process import Process
from .topology import Line, Topology

__all__ = ["Asked", "check", "clean_up", "run"]

_GRACE_S = 10.0  # after Ctrl-C, for the hosts' commands to end by themselves
_WAKE_S = 0.2


@config
class Asked:
    """What was asked for, as it was written."""

    topology: Path
    command: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    duration: str | None = None
    cut: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    kill: tuple[str, ...] = ()

    def faults(self) -> list[Fault]:
        kinds: tuple[tuple[FaultKind, tuple[str, ...]], ...]
        kinds = (("cut", self.cut), ("stop", self.stop), ("kill", self.kill))
        return [Fault.parse(kind, text) for kind, texts in kinds for text in texts]


def run(asked: Asked) -> int:
    """Run the commands until all have ended, the time is up or Ctrl-C. The exit code: 0 if none of them failed."""
    topology = Topology.read(asked.topology)
    plan = moments(asked.faults())
    for host in [*asked.only, *(host for moment in plan for host in moment.hosts)]:
        topology.spec(host)  # says which hosts there are, if this is none
    commands = _commands(topology, asked)
    duration_s = None if asked.duration is None else parse_seconds(asked.duration)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as politely as Ctrl-C
    with Testbed(topology) as bed, selectors.DefaultSelector() as outputs:
        lines = Lines(list(commands))
        started = []
        for host, command in commands.items():
            process = bed.hosts[host].run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert process.stdout is not None
            outputs.register(process.stdout, selectors.EVENT_READ, process)
            started.append(process)
        loop = _Loop(bed, started, outputs, lines)
        try:
            loop.run(plan, duration_s)
        except KeyboardInterrupt:
            lines.say("stopping")
        ended_by_themselves = [process for process in started if process.poll() is not None]
        loop.end()
        return max((1 for process in ended_by_themselves if process.returncode != 0), default=0)


def check(path: Path) -> None:
    """Print the hosts of a topology, and what this machine lacks to make them."""
    topology = Topology.read(path)
    table = rich.table.Table(box=None, header_style="bold")
    for heading in ("host", "home", "address", "seen as", "up", "down", "delay", "cpu", "memory"):
        table.add_column(heading)
    for spec in topology.hosts:
        memory = "all" if spec.memory_bytes is None else format_bytes(spec.memory_bytes)
        table.add_row(
            spec.name, spec.home or "-", topology.address(spec.name), topology.public_address(spec.name),
            *_words(spec.line), "all" if spec.cpu is None else f"{spec.cpu:g}", memory,
        )  # fmt: skip
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has room for the table
    console.print(table)
    lacking = missing()
    if lacking:
        raise TestbedRefused(f"this machine cannot have a testbed, it lacks {'; '.join(lacking)}")
    console.print("this machine has all that a testbed needs")


def clean_up() -> None:
    """Remove what is left of beds whose owner is gone, and say what that was."""
    console = Console()
    for sentence in clean() or ["nothing is left of any earlier testbed"]:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _commands(topology: Topology, asked: Asked) -> dict[str, list[str]]:
    """The command of every host that has one; `{name}` and `{address}` are the host's own."""
    commands = {}
    for spec in topology.hosts:
        command = spec.command or (() if asked.only else asked.command)
        if spec.name in asked.only and asked.command:
            command = asked.command
        if command:
            values = {"{name}": spec.name, "{address}": topology.address(spec.name)}
            commands[spec.name] = [_filled(word, values) for word in command]
    require(bool(commands), "there is nothing to run: give a command after --, or `command =` in the file")
    return commands


def _filled(word: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        word = word.replace(key, value)
    return word


def _words(line: Line) -> tuple[str, str, str]:
    up, down = line.up_bytes_per_s, line.down_bytes_per_s
    rates = ["no limit" if rate is None else format_rate(rate) for rate in (up, down)]
    return rates[0], rates[1], format_seconds(line.delay_s)


class _Loop:
    """Prints what the hosts print and lets faults happen on time."""

    def __init__(
        self, bed: Testbed, processes: list[Process], outputs: selectors.DefaultSelector, lines: Lines
    ) -> None:
        self._bed, self._processes, self._outputs, self._lines = bed, processes, outputs, lines
        self._said: set[str] = set()

    def run(self, plan: list[Moment], duration_s: float | None) -> None:
        """Until all processes have ended or the time is up."""
        start_s, plan = time.monotonic(), list(plan)
        while self._alive():
            now_s = time.monotonic() - start_s
            if duration_s is not None and now_s >= duration_s:
                return self._lines.say(f"{format_seconds(duration_s)} are over")
            while plan and plan[0].at_s <= now_s:
                self._happen(plan.pop(0))
            due_s = min(
                [moment.at_s for moment in plan[:1]] + ([] if duration_s is None else [duration_s]), default=1e9
            )
            self._pass_on(max(0.0, min(_WAKE_S, due_s - now_s)))
        return None

    def end(self) -> None:
        """Ask the commands to stop and print what they still say; a second Ctrl-C does not wait."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: a shell's children too
                os.killpg(process.pid, signal.SIGCONT)  # a stopped one cannot listen
        end_s = time.monotonic() + _GRACE_S
        try:
            while self._alive() and time.monotonic() < end_s:
                self._pass_on(_WAKE_S)
        except KeyboardInterrupt:
            self._lines.say("killing")
        self._pass_on(0.0)

    def _alive(self) -> bool:
        for process in self._processes:
            if process.poll() is not None and process.host not in self._said:
                self._said.add(process.host)
                self._pass_on(0.0)
                self._lines.say(f"{process.host} {_ending(process.returncode)}")
        return len(self._said) < len(self._processes)

    def _happen(self, moment: Moment) -> None:
        self._lines.say(str(moment))
        getattr(self._bed, moment.do)(*moment.hosts)

    def _pass_on(self, wait_s: float) -> None:
        for key, _ in self._outputs.select(wait_s):
            chunk = os.read(key.fd, 65_536)
            self._lines.output(key.data.host, chunk)
            if not chunk:
                self._outputs.unregister(key.fileobj)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
