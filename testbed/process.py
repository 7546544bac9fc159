"""Starts processes on hosts of the testbed: a `subprocess.Popen` in the host's namespaces and control group.

A shell enters the namespaces and the group and then executes the command, so that the process we hold is the command
itself. We put it into the group too, so that killing the host right after the start kills this process as well. It has
a session of its own: Ctrl-C at our terminal does not reach it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Process", "start_process", "wait_until_stopped"]

_ENTER = """
cd -- "$1" || exit 126
shift
while [ "$1" != -- ]; do echo 0 > "$1" || exit 126; shift; done
shift
exec "$@"
"""


class Process(subprocess.Popen[str]):
    """A process on a host; `host` is the name of that host."""

    def __init__(self, host: str, *args: Any, **options: Any) -> None:
        self.host = host
        super().__init__(*args, text=True, start_new_session=True, **options)

    def close(self) -> None:
        """Reap the process, which has exited or been killed, and close our ends of its pipes."""
        self.wait(10)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def start_process(
    host: str,
    namespaces: Mapping[str, str],
    procs_files: Sequence[str],
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    **options: Any,
) -> Process:
    """Start a command on a host. `env` is added to our environment; `options` are those of `Popen`."""
    enter = ["nsenter", *(f"--{kind}={path}" for kind, path in namespaces.items()), "--"]
    shell = ["/bin/sh", "-c", _ENTER, "sh", str(Path.cwd() if cwd is None else cwd.resolve()), *procs_files, "--"]
    process = Process(host, [*enter, *shell, *command], env={**os.environ, **(env or {})}, **options)
    for file in procs_files:
        with suppress(ProcessLookupError):  # it has exited already
            Path(file).write_text(str(process.pid))
    return process


def wait_until_stopped(pids: Iterable[int], deadline_s: float = 5.0) -> None:
    """Wait until every thread of these processes has stopped or exited: a signal takes a moment to reach all."""
    end_s = time.monotonic() + deadline_s
    for pid in pids:
        while not _is_stopped(pid) and time.monotonic() < end_s:
            time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    try:
        states = [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread exited meanwhile
        return not Path(f"/proc/{pid}").exists()
    return all(state in "TtZX" for state in states)
