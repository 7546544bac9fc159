"""Forks the workers of a local run from one process that has imported torch: each starts in milliseconds.

    python -P -m ravnest.worker.fork_server --control 5

A request is one byte with three file descriptors: the worker's control link, its log, and a socket for its status. The
server sends the worker's exit code over the status socket; it kills the worker when the other end is shut down. The
server ends with its owner, when the control socket is closed, and so do its workers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import selectors
import signal
import socket
import struct
from typing import NoReturn

from ravnest.worker.process import import_optimizers, run_worker

__all__ = ["main"]

_DESCRIPTORS = 3


class _ForkServer:
    """Forks a worker for each request, and reports the end of each."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._status: dict[int, socket.socket] = {}  # by pid
        self._signalled, self._signals = socket.socketpair()
        self._signals.setblocking(False)
        signal.set_wakeup_fd(self._signals.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only so that it wakes the selector
        self._selector = selectors.DefaultSelector()
        for sock in (self._control, self._signalled):
            self._selector.register(sock, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the owner ends."""
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._signalled in ready:
                self._signalled.recv(4096)
                self._reap()
            for pid, status in self._status.items():
                if status in ready:  # the owner sends nothing: it has shut its end down
                    self._selector.unregister(status)
                    os.kill(pid, signal.SIGKILL)
            if self._control in ready and not self._serve():
                return

    def _serve(self) -> bool:
        """Fork the worker of one request; false when the owner has ended."""
        request, descriptors, _, _ = socket.recv_fds(self._control, 1, _DESCRIPTORS)
        if not request or len(descriptors) != _DESCRIPTORS:
            return False
        control, log, status = descriptors
        pid = os.fork()
        if pid == 0:
            self._become_worker(control, log, status)
        os.close(control)
        os.close(log)
        self._status[pid] = socket.socket(fileno=status)
        self._selector.register(self._status[pid], selectors.EVENT_READ)
        return True

    def _become_worker(self, control: int, log: int, status: int) -> NoReturn:
        """Close what belongs to the server, so that its end and that of other workers are seen."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            self._selector.close()
            for sock in (self._control, self._signalled, self._signals, *self._status.values()):
                sock.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            for descriptor in (log, status):
                os.close(descriptor)
            run_worker(control)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        for pid in list(self._status):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                sock = self._status.pop(pid)
                with contextlib.suppress(KeyError):  # it was killed
                    self._selector.unregister(sock)
                with contextlib.suppress(OSError), sock:  # the owner no longer waits for it
                    sock.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", type=int, required=True)
    control = socket.socket(fileno=parser.parse_args().control)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_optimizers()
    gc.freeze()  # the collector would write to the pages that the workers share
    _ForkServer(control).run()
    os._exit(0)


if __name__ == "__main__":
    main()
