"""Runs `python -m testbed`: starts the commands of the hosts, prints their output and injects faults at set times."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from pathlib import Path

import rich.table
from rich.console import Console

from ravnest.core.config import config, require
from ravnest.core.units import format_bytes, format_rate, format_seconds, parse_seconds
from testbed.cleanup import clean
from testbed.faults import Fault, FaultKind, TimedAction, schedule
from testbed.output import HostOutput
from testbed.process import Process
from testbed.requirements import TestbedUnavailable, missing
from testbed.testbed import Testbed
from testbed.topology import Line, Topology

__all__ = ["TestbedOptions", "check", "clean_up", "run"]

_GRACE_S = 10.0  # after Ctrl-C, for the hosts' commands to exit by themselves
_POLL_S = 0.2


@config
class TestbedOptions:
    """The arguments of the command line, not parsed yet."""

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


def run(options: TestbedOptions) -> int:
    """Run the commands until all have exited, the duration is over or Ctrl-C.

    Returns 1 if a command failed by itself, otherwise 0.
    """
    topology = Topology.read(options.topology)
    actions = schedule(options.faults())
    for host in [*options.only, *(host for action in actions for host in action.hosts)]:
        topology.spec(host)  # raises with the names of the hosts if there is no such host
    commands = _commands(topology, options)
    duration_s = None if options.duration is None else parse_seconds(options.duration)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handled like Ctrl-C
    with Testbed(topology) as testbed, selectors.DefaultSelector() as outputs:
        printer = HostOutput(list(commands))
        processes = []
        for host, command in commands.items():
            process = testbed.hosts[host].run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert process.stdout is not None
            outputs.register(process.stdout, selectors.EVENT_READ, process)
            processes.append(process)
        loop = _Loop(testbed, processes, outputs, printer)
        try:
            loop.run(actions, duration_s)
        except KeyboardInterrupt:
            printer.note("stopping")
        exited = [process for process in processes if process.poll() is not None]
        loop.stop_commands()
        return max((1 for process in exited if process.returncode != 0), default=0)


def check(path: Path) -> None:
    """Print the hosts of a topology. Raises `TestbedUnavailable` if this machine cannot run them."""
    topology = Topology.read(path)
    table = rich.table.Table(box=None, header_style="bold")
    for heading in ("host", "home", "address", "seen as", "up", "down", "delay", "cpu", "memory"):
        table.add_column(heading)
    for spec in topology.hosts:
        memory = "all" if spec.memory_bytes is None else format_bytes(spec.memory_bytes)
        table.add_row(
            spec.name, spec.home or "-", topology.address(spec.name), topology.public_address(spec.name),
            *_line_columns(spec.line), "all" if spec.cpu is None else f"{spec.cpu:g}", memory,
        )  # fmt: skip
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has room for the table
    console.print(table)
    if lacking := missing():
        raise TestbedUnavailable(lacking)
    console.print("this machine can run a testbed")


def clean_up() -> None:
    """Remove and print what testbeds without an owner have left behind."""
    console = Console()
    for sentence in clean() or ["no earlier testbed has left anything behind"]:
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _commands(topology: Topology, options: TestbedOptions) -> dict[str, list[str]]:
    """The command of every host that has one, with `{name}` and `{address}` filled in."""
    commands = {}
    for spec in topology.hosts:
        command = spec.command or (() if options.only else options.command)
        if spec.name in options.only and options.command:
            command = options.command
        if command:
            address = topology.address(spec.name)
            commands[spec.name] = [word.replace("{name}", spec.name).replace("{address}", address) for word in command]
    require(bool(commands), "there is nothing to run: give a command after --, or `command =` in the file")
    return commands


def _line_columns(line: Line) -> tuple[str, str, str]:
    up, down = line.up_bytes_per_s, line.down_bytes_per_s
    rates = ["no limit" if rate is None else format_rate(rate) for rate in (up, down)]
    return rates[0], rates[1], format_seconds(line.delay_s)


class _Loop:
    """Prints the output of the hosts and carries out actions when they are due."""

    def __init__(
        self, testbed: Testbed, processes: list[Process], outputs: selectors.DefaultSelector, printer: HostOutput
    ) -> None:
        self._testbed, self._processes, self._outputs, self._printer = testbed, processes, outputs, printer
        self._exited: set[str] = set()

    def run(self, actions: list[TimedAction], duration_s: float | None) -> None:
        """Return when all processes have exited or `duration_s` is over."""
        start_s, pending = time.monotonic(), list(actions)
        while self._is_any_alive():
            now_s = time.monotonic() - start_s
            if duration_s is not None and now_s >= duration_s:
                return self._printer.note(f"stopping after {format_seconds(duration_s)}")
            while pending and pending[0].at_s <= now_s:
                action = pending.pop(0)
                self._printer.note(str(action))
                getattr(self._testbed, action.name)(*action.hosts)
            due_s = min(
                [action.at_s for action in pending[:1]] + ([] if duration_s is None else [duration_s]), default=1e9
            )
            self._print_output(max(0.0, min(_POLL_S, due_s - now_s)))
        return None

    def stop_commands(self) -> None:
        """Interrupt the commands and print the rest of their output; a second Ctrl-C does not wait."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does: a shell's children too
                os.killpg(process.pid, signal.SIGCONT)  # a stopped process does not handle signals
        end_s = time.monotonic() + _GRACE_S
        try:
            while self._is_any_alive() and time.monotonic() < end_s:
                self._print_output(_POLL_S)
        except KeyboardInterrupt:
            self._printer.note("killing")
        self._print_output(0.0)

    def _is_any_alive(self) -> bool:
        for process in self._processes:
            if process.poll() is not None and process.host not in self._exited:
                self._exited.add(process.host)
                self._print_output(0.0)
                self._printer.note(f"{process.host} {_exit_text(process.returncode)}")
        return len(self._exited) < len(self._processes)

    def _print_output(self, timeout_s: float) -> None:
        for key, _ in self._outputs.select(timeout_s):
            chunk = os.read(key.fd, 65_536)
            self._printer.output(key.data.host, chunk)
            if not chunk:
                self._outputs.unregister(key.fileobj)


def _exit_text(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
