"""Checks whether this machine can run a testbed, by trying each thing that it needs once."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from ravnest.errors import RavnestError

__all__ = ["TestbedUnavailable", "missing"]


class TestbedUnavailable(RavnestError):
    """This machine cannot run a testbed."""

    __test__ = False  # the name is not for pytest

    def __init__(self, lacking: Sequence[str]) -> None:
        super().__init__(f"this machine cannot run a testbed, it lacks {'; '.join(lacking)}")


def missing() -> list[str]:
    """What this machine lacks, one phrase each; empty if a testbed can run."""
    if sys.platform != "linux":
        return [f"Linux (this is {sys.platform})"]
    return list(_failed_trials())


def _failed_trials() -> Iterator[str]:
    for requirement, trial in (
        ("new namespaces (root)", _try_namespaces),
        ("TUN devices (/dev/net/tun and root)", _try_tun),
        ("writable control groups for cpu and memory", _try_groups),
    ):
        error = _run_trial(trial)
        if error is not None:
            yield f"{requirement}: {error.strerror or error}"
    if shutil.which("nsenter") is None:
        yield "the program nsenter, of util-linux"


def _run_trial(trial: Callable[[], None]) -> OSError | None:
    """Run a trial in a thread of its own, because it changes the namespaces of its thread."""
    failed: list[OSError] = []

    def run() -> None:
        try:
            trial()
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return failed[0] if failed else None


def _try_namespaces() -> None:
    from testbed.namespaces import leave_network

    leave_network()


def _try_tun() -> None:
    import os

    from testbed.namespaces import leave_network, open_tun

    leave_network()
    os.close(open_tun("trial"))


def _try_groups() -> None:
    from testbed.groups import ControlGroups, roots
    from testbed.topology import HostSpec

    lacking = {"cpu", "cpuacct", "memory"} - roots().keys()
    if lacking:
        raise OSError(f"no hierarchy has {', '.join(sorted(lacking))}")
    groups = ControlGroups(ControlGroups.name_for(0))
    try:
        groups.create(HostSpec(name="trial", cpu=1.0, memory_bytes=10**9))
    finally:
        groups.remove()
