"""The owner's side of the forwarder process: starts it, sends it requests and ends it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from typing import Any

import msgspec

from ravnest.errors import RavnestError
from testbed.topology import Topology

__all__ = ["ForwarderClient", "ForwarderFailed"]

_TIMEOUT_S = 30.0  # the forwarder has priority on its core: it answers at once or is dead


class ForwarderFailed(RavnestError):
    """The forwarder could not create the hosts, or ended: no packet passes any more."""


class ForwarderClient:
    """A running forwarder. Requests may be sent from any thread."""

    def __init__(self, topology: Topology, testbed: str) -> None:
        mine, theirs = socket.socketpair()
        mine.settimeout(_TIMEOUT_S)
        command = [sys.executable, "-m", "testbed.forwarder", str(theirs.fileno()), testbed]
        with theirs:  # a session of its own: Ctrl-C reaches the owner, which then ends the forwarder
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._control, self._answers = mine, mine.makefile("rb")
        self._lock = threading.Lock()
        try:
            ready = self._request(topology)
            if "error" in ready:
                raise ForwarderFailed(f"the hosts of the testbed cannot be created: {ready['error']}")
        except BaseException:
            self.close()
            raise
        self._namespaces: dict[str, dict[str, int]] = ready["namespaces"]

    def namespace(self, host: str, kind: str) -> str:
        """A path to a namespace of a host: `network`, `uts` or `mounts`."""
        return f"/proc/{self._process.pid}/fd/{self._namespaces[host][kind]}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, do: str, **arguments: Any) -> Any:
        return self._request({"do": do, **arguments})

    def _request(self, request: object) -> Any:
        with self._lock:
            try:
                self._control.sendall(msgspec.json.encode(request) + b"\n")
                answer = self._answers.readline()
            except OSError as error:
                raise ForwarderFailed(f"the testbed's forwarder does not answer: {error}") from error
        if not answer:
            raise ForwarderFailed(f"the testbed's forwarder exited with code {self._process.wait()}")
        return msgspec.json.decode(answer)

    def close(self) -> None:
        """End the forwarder and with it the namespaces."""
        self._answers.close()
        self._control.close()
        try:
            self._process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
