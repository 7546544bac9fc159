"""The owner's side of the forwarder: starts it, asks it, ends it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from typing import Any

import msgspec

from ..core.errors import RavnestError
from .topology import Topology

__all__ = ["Internet", "TestbedBroken"]

_ANSWER_S = 30.0  # the forwarder comes first on its processor: it answers at once or is dead


class TestbedBroken(RavnestError):
    """The forwarder ended: no packet passes any more."""

    __test__ = False  # the name is not for pytest


class Internet:
    """A running forwarder. Any thread may ask."""

    def __init__(self, topology: Topology, bed: str) -> None:
        mine, theirs = socket.socketpair()
        mine.settimeout(_ANSWER_S)
        command = [sys.executable, "-m", "ravnest.testbed.forwarder", str(theirs.fileno()), bed]
        with theirs:  # a session of its own: Ctrl-C is for the owner, which then ends us
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._control, self._answers = mine, mine.makefile("rb")
        self._one_at_a_time = threading.Lock()
        try:
            ready = self._ask(topology)
            if "refused" in ready:
                raise TestbedBroken(f"the hosts cannot be made: {ready['refused']}")
        except BaseException:
            self.close()
            raise
        self._spaces: dict[str, dict[str, int]] = ready["spaces"]

    def namespace(self, host: str, kind: str) -> str:
        """A path to a namespace of a host: `network`, `names` or `mounts`."""
        return f"/proc/{self._process.pid}/fd/{self._spaces[host][kind]}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, do: str, **what: Any) -> Any:
        return self._ask({"do": do, **what})

    def _ask(self, request: object) -> Any:
        with self._one_at_a_time:
            try:
                self._control.sendall(msgspec.json.encode(request) + b"\n")
                answer = self._answers.readline()
            except OSError as error:
                raise TestbedBroken(f"the testbed's forwarder does not answer: {error}") from error
        if not answer:
            raise TestbedBroken(f"the testbed's forwarder ended with code {self._process.wait()}")
        return msgspec.json.decode(answer)

    def close(self) -> None:
        """End the forwarder; the namespaces go with it."""
        self._answers.close()
        self._control.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
