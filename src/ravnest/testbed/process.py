"""A process on a host of the testbed: a `subprocess.Popen` in the host's namespaces and control group.

A shell goes into the namespaces and the group and then becomes the command, so that the process we hold is the command
itself. We put it into the group too: whoever kills the host right after the start means this process as well. It has a
session of its own: Ctrl-C at our terminal does not reach it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Process", "await_standstill", "run_in"]

_ENTER = """
cd -- "$1" || exit 126
shift
while [ "$1" != -- ]; do echo 0 > "$1" || exit 126; shift; done
shift
exec "$@"
"""


class Process(subprocess.Popen[str]):
    """What `Host.run` returns; `host` is where it runs."""

    def __init__(self, host: str, *args: Any, **options: Any) -> None:
        self.host = host
        super().__init__(*args, text=True, start_new_session=True, **options)

    def close(self) -> None:
        """Reap the process, which has ended or been killed, and close our ends of its pipes."""
        self.wait(10)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def run_in(
    host: str,
    namespaces: Mapping[str, str],
    joining: Sequence[str],
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    **options: Any,
) -> Process:
    """Start a command on a host. `env` is added to our environment; `options` are those of `Popen`."""
    enter = ["nsenter", *(f"--{kind}={path}" for kind, path in namespaces.items()), "--"]
    shell = ["/bin/sh", "-c", _ENTER, "sh", str(Path.cwd() if cwd is None else cwd.resolve()), *joining, "--"]
    started = Process(host, [*enter, *shell, *command], env={**os.environ, **(env or {})}, **options)
    for file in joining:
        with suppress(ProcessLookupError):  # it has ended already
            Path(file).write_text(str(started.pid))
    return started


def await_standstill(pids: Iterable[int], deadline_s: float = 5.0) -> None:
    """Until every thread of these processes has stopped, or is no more: a signal takes a moment to get to all."""
    end_s = time.monotonic() + deadline_s
    for pid in pids:
        while not _stands_still(pid) and time.monotonic() < end_s:
            time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    try:
        states = [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended meanwhile
        return not Path(f"/proc/{pid}").exists()
    return all(state in "TtZX" for state in states)
