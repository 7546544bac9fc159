"""Every code block of the README, the tutorials and some guides runs, in order, in a directory of its own.

Python blocks are run as scripts; of a console block the lines after `$ ` are run. A comment on the line before a block
changes that; its parts are separated by semicolons:

    <!-- not run: REASON -->    the block is skipped
    <!-- file: NAME -->         the block is saved under that name
    <!-- background -->         the command runs while the next blocks do; its end is awaited at the end
    <!-- retry -->              the command is repeated until it succeeds
    <!-- needs: MODULE.NAME --> the block is skipped where that cannot be imported

All ends of a run are on this machine: `:7700` becomes a free port of the loopback interface, and a ticket in a command
becomes the one that was printed. Trainings in the background last until Ctrl-C, sent before the next script or at the
end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
TUTORIALS = [ROOT / "README.md"]
LONG = [
    *sorted({*(ROOT / "docs/tutorial").glob("*.md")} - {*TUTORIALS}),
    *(ROOT / f"docs/how-to/{name}.md" for name in ("data", "fine-tune", "track")),
]
DOCUMENTS = [*TUTORIALS, *(pytest.param(path, marks=pytest.mark.soak) for path in LONG)]
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TICKET = re.compile(r"rav1-[a-z0-9]+|rav1-\.\.\.")
_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    directives: dict[str, str]

    @property
    def is_runnable(self) -> bool:
        needed = self.directives.get("needs")
        is_code = self.language in ("python", "console", "sh")
        return is_code and "not run" not in self.directives and (needed is None or can_import(needed))

    @property
    def commands(self) -> list[str]:
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]


def blocks_of(document: Path) -> Iterator[Block]:
    for comment, language, text in _BLOCK.findall(document.read_text()):
        parts = [part.partition(":") for part in comment.split(";")] if comment else []
        yield Block(language, text, {key.strip(): value.strip() for key, _, value in parts})


@dataclass
class Terminal:
    """Runs blocks in one directory."""

    directory: Path
    background: list[tuple[str, subprocess.Popen[bytes], Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        programs = self.directory / "bin"
        programs.mkdir()
        for name, command in (("ravnest", "-m ravnest"), ("python", "")):
            path = programs / name
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
            path.chmod(0o755)
        self.env = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(self.directory / "home"),
            "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.env.pop("XDG_DATA_HOME", None)

    def run(self, block: Block) -> None:
        if "file" in block.directives:
            (self.directory / block.directives["file"]).write_text(block.text)
        elif block.language == "python":
            self.finish()  # a script needs the processor, and no training beside it
            done = self._run([sys.executable, "-c", block.text])
            assert done.returncode == 0, f"{block.text}\n{done.stdout}{done.stderr}"
        else:
            for command in block.commands:
                self._run_command(self._on_this_machine(command), block)

    def _run_command(self, command: str, block: Block) -> None:
        if "background" in block.directives:
            command = re.sub(r"--steps \d+", "--steps 1000000", command)
            output = self.directory / f"output-{len(self.background)}"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    ["bash", "-c", f"exec {command}"],
                    cwd=self.directory,
                    env=self.env,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.background.append((command, process, output))
            return
        if "retry" in block.directives:  # each failing attempt takes seconds of the processor
            self._wait_for_a_step(next(c for c, _, _ in self.background if "--run-dir" in c))
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            done = self._run(["bash", "-c", command])
            if done.returncode == 0 or "retry" not in block.directives or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}{self._outputs()}"

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.directory, env=self.env, capture_output=True, text=True, timeout=_TIMEOUT_S
        )

    def _on_this_machine(self, command: str) -> str:
        command = command.replace("--listen :7700", "--listen 127.0.0.1:0")
        return _TICKET.sub(lambda _: self._ticket(), command) if _TICKET.search(command) else command

    def _ticket(self) -> str:
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            for _, _, output in self.background:
                if found := _TICKET.search(output.read_text()):
                    return found[0]
            time.sleep(0.1)
        raise AssertionError(f"no ticket was printed: {self._outputs()}")

    def finish(self) -> None:
        """End the trainings by Ctrl-C once they have trained, then the agents, which would wait for the next run."""
        for agents in (False, True):
            for command, process, _ in self.background:
                if command.startswith("ravnest join") is not agents:
                    continue
                if not agents:
                    self._wait_for_a_step(command)
                process.send_signal(signal.SIGINT)
                assert process.wait(_TIMEOUT_S) == 0, f"$ {command}\n{self._outputs()}"
        self.background.clear()

    def _wait_for_a_step(self, command: str) -> None:
        metrics = self.directory / command.split("--run-dir ")[1].split()[0] / "metrics.jsonl"
        deadline = time.monotonic() + _TIMEOUT_S
        while not metrics.exists() or b"\n" not in metrics.read_bytes():
            assert time.monotonic() < deadline, f"no step was trained: {self._outputs()}"
            time.sleep(0.1)

    def kill(self) -> None:
        for _, process, _ in self.background:
            process.kill()
            process.wait()

    def _outputs(self) -> str:
        return "".join(f"\n$ {command}\n{output.read_text()}" for command, _, output in self.background)


@cache
def can_import(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    code = f"from {module} import {attribute}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=_TIMEOUT_S).returncode == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.stem for path in (*TUTORIALS, *LONG)])
def test_blocks_run(document: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    try:
        for block in blocks_of(document):
            if block.is_runnable:
                terminal.run(block)
        terminal.finish()
    finally:
        terminal.kill()
