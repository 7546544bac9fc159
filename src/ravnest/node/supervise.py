"""The worker process as its agent has it: started with one end of a socket pair, heard, ended for certain.

Two threads hold the link; what they hear, and the end of the process, are told in the agent's asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

from ..core.errors import LinkError
from ..core.orders import Stop
from ..net.link import LinkConfig
from ..net.pump import Pump, PumpConfig
from ..net.unix import unix_link
from .talk import Begin, FromAgent, FromWorker

__all__ = ["WorkerProcess"]

_TELL_S = 5.0
_END_S = 5.0
_LAST_WORDS = 300


class WorkerProcess:
    """One process; when it ends by itself, `ended` hears why, once."""

    def __init__(
        self, begin: Begin, log: Path, heard: Callable[[FromWorker], None], ended: Callable[[str], None]
    ) -> None:
        self._log, self._ended = log, ended
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs, log)
        self._pump = Pump(
            unix_link(ours, LinkConfig(headers=FromWorker), peer="the worker"),
            lambda header, lengths: [],
            lambda header, _: self._in_loop(lambda: heard(cast("FromWorker", header))),
            lambda error: self._in_loop(self._look),
            PumpConfig(capacity=256),
        )
        self._pump.start()
        self.tell(begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, said: FromAgent) -> None:
        with contextlib.suppress(LinkError):  # a worker that is gone is an event of its own
            self._pump.put(said, deadline_s=_TELL_S)

    async def end(self, patience_s: float) -> None:
        """Ask it to leave, and see that it has."""
        self._is_over = True
        self.tell(Stop())
        await asyncio.to_thread(self._wait, patience_s)
        self._pump.close()

    def kill(self) -> None:
        self._is_over = True
        self._process.kill()

    def _wait(self, patience_s: float) -> int:
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(_END_S)

    def _in_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to hear it
            self._loop.call_soon_threadsafe(call)

    def _look(self) -> None:
        """Its link is broken: see why, without holding up the loop."""
        if not self._is_over:
            self._is_over = True
            threading.Thread(target=self._bury, name="bury the worker", daemon=True).start()

    def _bury(self) -> None:
        code = self._wait(_END_S)
        how = f"was ended by signal {-code}" if code < 0 else f"left with code {code}"
        words = f": {self._last_words()}" if code > 0 and self._last_words() else ""
        self._in_loop(lambda: self._ended(f"the worker process {how}{words}"))

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            return lines[-1][-_LAST_WORDS:] if lines else ""
        return ""


def _spawn(control: socket.socket, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ravnest.node.station", "--control", str(control.fileno())],
            pass_fds=[control.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the agent alone
        )
