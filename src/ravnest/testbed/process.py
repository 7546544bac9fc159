"""A process on a host of the testbed: a `subprocess.Popen` in the host's namespaces and control group.

A shell goes into the namespaces and the group and then becomes the command, so that the process we hold is the command
itself. It has a session of its own: Ctrl-C at our terminal does not reach it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Process", "run_in"]

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
        self.wait()
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
    return Process(host, [*enter, *shell, *command], env={**os.environ, **(env or {})}, **options)
