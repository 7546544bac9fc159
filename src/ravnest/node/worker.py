"""The worker process of a run on one machine: receives a stage as data, computes it, holds its links.

    python -m ravnest.node.worker --control 5 --before 6 --after 7

The numbers are open sockets that the parent hands down. The worker leaves when it is told to, when a link breaks,
and when its parent is gone; nothing else ends it but a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..core.errors import LinkError, RavnestError
from ..core.messages import Data
from ..core.orders import Reports
from ..graph import Limits, load
from ..net.link import Link, LinkConfig
from ..net.pump import Pump
from ..net.unix import unix_link
from .allocator import keep_freed_memory
from .orders import Assign, Orders
from .stagework import StageWork, failure_of

__all__ = ["begin_process", "live", "main"]

_ASSIGN_S = 300.0
_log = logging.getLogger("ravnest.worker")


def run(control_fd: int, before_fd: int, after_fd: int | None) -> None:
    """Be a worker until told to stop."""
    link = unix_link(socket.socket(fileno=control_fd), LinkConfig(headers=Orders), peer="parent")
    file: list[bytearray] = []

    def place(header: Any, lengths: tuple[int, ...]) -> list[memoryview]:
        file[:] = [bytearray(n) for n in lengths if n <= Limits().text_bytes]
        return [memoryview(b) for b in file]

    assign = link.receive(place, deadline_s=_ASSIGN_S)
    assert isinstance(assign, Assign)
    torch.set_num_threads(assign.threads)
    if assign.core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {assign.core})
    limits = Limits(batch=assign.max_batch)
    stage = load(bytes(file[0]), limits)

    def tell(report: Reports) -> None:
        control.put(report, deadline_s=assign.settings.patience_s)

    before = _link(before_fd, stage.index - 1)
    after = None if after_fd is None else _link(after_fd, stage.index + 1)
    work = StageWork(stage, assign, limits, before, after, tell)
    control = Pump(link, place, lambda order, _: work.order(order), work.breaks("the link to the parent"))  # type: ignore[arg-type]
    control.start()
    _log.info("stage %d of %d: %d ops", stage.index, stage.count, len(stage.ops))
    try:
        work.run()
    except Exception as error:  # the supervisor of this stage: the parent must know why, whatever it was
        with contextlib.suppress(LinkError):  # the parent may be what is gone
            tell(failure_of(error))
        control.close(flush_s=2.0)
        raise
    work.close(flush_s=5.0)
    control.close(flush_s=5.0)


def _link(fd: int, index: int) -> Link:
    peer = f"stage {index}" if index >= 0 else "the feeder"
    return unix_link(socket.socket(fileno=fd), LinkConfig(headers=Data), peer=peer)


def begin_process() -> None:
    """What every worker process does first: it ends with its parent, and leaves Ctrl-C to it."""
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()


def _watch_parent(parent: int) -> None:
    """End with the parent even in the middle of a long computation."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)


def live(work: Callable[[], None]) -> NoReturn:
    """Work, and leave at once: to take Python and torch apart would keep a core busy for half a second."""
    code = 0
    try:
        work()
    except RavnestError as error:
        _log.error("%s", error)
        code = 1
    logging.shutdown()
    os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--before", type=int, required=True)
    parser.add_argument("--after", type=int)
    options = parser.parse_args()
    begin_process()
    live(lambda: run(options.control, options.before, options.after))


if __name__ == "__main__":
    main()
