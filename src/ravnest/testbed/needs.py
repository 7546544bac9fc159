"""What a testbed needs of the machine, found out by trying each thing once."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Iterator

from ..core.errors import RavnestError

__all__ = ["TestbedRefused", "missing"]


class TestbedRefused(RavnestError):
    """This machine cannot have a testbed; the sentence says what it lacks."""

    __test__ = False  # the name is not for pytest


def missing() -> list[str]:
    """What this machine lacks, in words; nothing: a testbed will work."""
    if sys.platform != "linux":
        return [f"a testbed needs Linux; this is {sys.platform}"]
    return list(_lacks())


def _lacks() -> Iterator[str]:
    for what, trial in (
        ("new namespaces (root)", _try_namespaces),
        ("TUN devices (/dev/net/tun and root)", _try_tun),
        ("control groups for cpu and memory that we may write to", _try_groups),
    ):
        error = _tried(trial)
        if error is not None:
            yield f"{what}: {error.strerror or error}"
    if shutil.which("nsenter") is None:
        yield "the program nsenter, of util-linux"


def _tried(trial: Callable[[], None]) -> OSError | None:
    """Run a trial in a thread of its own: what it does to its namespaces goes with it."""
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
    from .namespaces import leave_network

    leave_network()


def _try_tun() -> None:
    import os

    from .namespaces import leave_network, open_tun

    leave_network()
    os.close(open_tun("trial"))


def _try_groups() -> None:
    from .groups import Groups, roots
    from .topology import HostSpec

    found = roots()
    lacking = {"cpu", "cpuacct", "memory"} - found.keys()
    if lacking:
        raise OSError(f"there is none for {', '.join(sorted(lacking))}")
    groups = Groups(Groups.name_for(0))
    try:
        groups.make(HostSpec(name="trial", cpu=1.0, memory_bytes=10**9))
    finally:
        groups.remove()
