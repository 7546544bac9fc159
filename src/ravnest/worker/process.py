"""The worker process of a node: computes one stage after another until its agent ends.

    python -m ravnest.worker.process --control 5

The number is the file descriptor of a socket to the agent. The worker opens its endpoints once. A stage that fails is
reported to the agent, and the worker is free for the next one; the endpoints stay open. The process ends when the agent
stops it or ends.

Freed memory is kept in the process, so that the next microbatch reuses it. By default glibc returns large blocks to the
system at once, and the next microbatch gets them page by page, zeroed: thousands of page faults per microbatch, 3 to
8 % of the time of a small GPT. Blocks of 64 MB or more are returned at once: the gradient of a large embedding would
be kept next to the activations that took its place. Other systems are not configured.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from ravnest.core.rate_limit import RateLimiter
from ravnest.errors import LinkError, RavnestError
from ravnest.graph.device import check_device, choose_device, release_memory
from ravnest.protocol.commands import StopStage
from ravnest.protocol.control import AddressChanged, SendReplica, StageCommand, StageReport, StoreReplica
from ravnest.protocol.peer import PeerAddresses
from ravnest.protocol.worker import (
    AssignStage,
    EndpointOpened,
    FromAgent,
    LimitWorker,
    ReleaseStage,
    StageReleased,
    StartWorker,
    WorkerUnable,
)
from ravnest.transport.link import LinkConfig
from ravnest.transport.local import unix_link
from ravnest.transport.pump import Pump, PumpConfig
from ravnest.transport.stream import StreamLink
from ravnest.worker.assignment import AssignmentRun
from ravnest.worker.replica_store import ReplicaStore
from ravnest.worker.replication import ReplicaExchange, RunningStage
from ravnest.worker.resources import LocalPeers, WorkerResources
from ravnest.worker.torch_compiler import defer_compiler

__all__ = ["Worker", "import_optimizers", "keep_freed_memory", "run_worker"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_KEPT_BYTES = 2**30
_MAPPED_BYTES = 2**26  # a larger block is returned to the system when freed: kept, it would fragment the heap
_PAD_BYTES = 2**24


def keep_freed_memory() -> bool:
    """Configure the allocator to keep freed memory; false where it cannot be configured."""
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _MAPPED_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _PAD_BYTES))
    return all(mallopt(key, value) == 1 for key, value in settings)


def give_back_memory() -> bool:
    """Return kept memory to the system, between two stages; false if there was nothing to return."""
    malloc_trim = _glibc("malloc_trim")
    return malloc_trim is not None and malloc_trim(0) == 1


def _glibc(name: str) -> Any:
    """Look up a function of the C library; None where it does not exist."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


_START_S = 60.0
_SEND_S = 60.0
_log = logging.getLogger("ravnest.worker")


class _DeviceFailed(Exception):
    """The accelerator does not compute for this process any more."""


class Worker:
    """The worker of one node: one thread computes, the thread of the control link queues stages for it."""

    def __init__(self, link: StreamLink, start: StartWorker) -> None:
        self._start = start
        self._todo: queue.SimpleQueue[AssignmentRun | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next
        self._runs: list[AssignmentRun] = []  # the one that runs, and those to come
        self._resources: WorkerResources | None = None
        self._replicas: ReplicaExchange | None = None
        self._expected: dict[str, frozenset[str]] = {}  # admitted peers by purpose
        self._expecting = threading.Lock()  # guards changes of it
        self._pump = Pump(link, lambda header, lengths: [], self._handle, self._agent_lost, PumpConfig(capacity=256))

    def run(self) -> None:
        """Run until the agent stops it or ends."""
        self._pump.start()
        try:
            self._work()
        except _DeviceFailed as error:  # the next process finds out whether the device still works
            _log.error("%s", error)
            self._pump.close(flush_s=2.0)
            sys.exit(1)
        except (RavnestError, ValueError) as error:
            _log.error("%s", error)
            self._send(WorkerUnable(str(error)[:2000]))
        self._pump.close(flush_s=2.0)

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            self._resources = resources = self._open(stack)
            resources.replica_store.clear_drafts()
            self._replicas = ReplicaExchange(resources, self._running, self._send)
            self._send(EndpointOpened(0 if resources.remote is None else resources.remote.port))
            self._send(AddressChanged(resources.addresses))
            if resources.remote is not None:
                resources.remote.watch()
            import_optimizers()
            while (run := self._todo.get()) is not None:
                self._compute(run)
            self._replicas.close()

    def _open(self, stack: contextlib.ExitStack) -> WorkerResources:
        """Open the endpoints that this worker has; `stack` closes them."""
        start, limit, local, remote = self._start, self._start.max_upload_bytes_per_s, None, None
        device = choose_device(start.profile.device)
        check_device(device)
        if start.socket_directory:
            local = LocalPeers(Path(start.socket_directory), start.name)
            stack.callback(local.close)
        if start.identity:
            from ravnest.worker.remote_peers import RemotePeers  # certificates: 10 MB that a local run does not need

            remote = RemotePeers(start, self._is_expected, self._address_changed)
            stack.enter_context(remote.open())
        return WorkerResources(
            name=start.name,
            memory_bytes=start.profile.memory_bytes,
            threads=start.profile.threads,
            expect=self._expect,
            replica_store=ReplicaStore(Path(start.replica_directory)),
            host=start.host,
            local=local,
            remote=remote,
            rate_limiter=None if limit is None else RateLimiter(limit),
            processor_share=start.processor_share,
            device=device,
        )

    def _expect(self, purpose: str, names: Sequence[str]) -> None:
        """Replace the whole dictionary: the endpoint's thread reads it."""
        with self._expecting:
            others = {key: value for key, value in self._expected.items() if key != purpose}
            self._expected = {**others, purpose: frozenset(names)} if names else others

    def _is_expected(self, name: str) -> bool:
        return any(name in names for names in self._expected.values())

    def _running(self, cluster: str, stage: int) -> RunningStage | None:
        """Return the run of that stage, if this worker has it."""
        with self._lock:
            runs = [run for run in self._runs if (run.assignment.cluster, run.assignment.stage) == (cluster, stage)]
        return runs[0] if runs else None

    def _compute(self, run: AssignmentRun) -> None:
        """Run one assignment to its end."""
        assigned = run.assignment
        self._expect("stages", [peer.name for peer in (assigned.before, assigned.after) if peer is not None])
        _log.info(
            "generation %d: stage %d of %d in %s", assigned.generation, assigned.stage, assigned.count, assigned.cluster
        )
        run.run()
        self._expect("stages", [])
        self._expect("rings", [])
        with self._lock:
            self._runs.remove(run)
        replica = run.replica
        del run
        gc.collect()
        assert self._resources is not None
        release_memory(self._resources.device)
        give_back_memory()
        _log.info("generation %d is over", assigned.generation)
        self._send(StageReleased(assigned.generation, replica))
        try:
            check_device(self._resources.device)
        except RavnestError as error:
            raise _DeviceFailed(str(error)) from error

    def _handle(self, message: msgspec.Struct, _: Any) -> None:
        with self._lock:
            match message:
                case AssignStage():
                    self._stop(self._runs)
                    self._runs.append(self._new_run(message))
                    self._todo.put(self._runs[-1])
                case LimitWorker(memory_bytes=memory_bytes, threads=threads):
                    if self._resources is not None:
                        self._resources.memory_bytes, self._resources.threads = memory_bytes, threads
                    for run in self._runs:
                        run.set_threads(threads)
                case ReleaseStage(generation=generation):
                    self._stop([run for run in self._runs if run.assignment.generation == generation])
                case StageCommand(generation=generation, command=command):
                    for run in self._runs:
                        if run.assignment.generation == generation:
                            run.command(command)
                case SendReplica() | StoreReplica():
                    if self._replicas is not None:
                        self._replicas.start(message)
                case StopStage():
                    self._stop(self._runs)
                    self._todo.put(None)

    def _new_run(self, assign: AssignStage) -> AssignmentRun:
        assert self._resources is not None, "stages are assigned after the endpoints have been opened"
        assert self._replicas is not None
        generation = assign.assignment.generation
        return AssignmentRun(
            assign, self._resources, self._replicas, lambda report: self._send(StageReport(generation, report))
        )

    @staticmethod
    def _stop(runs: Sequence[AssignmentRun]) -> None:
        for run in runs:
            run.stop()

    def _agent_lost(self, error: Exception) -> None:
        self._handle(StopStage(), ())

    def _address_changed(self, addresses: PeerAddresses) -> None:
        self._send(AddressChanged(addresses))

    def _send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(LinkError):  # a lost agent is noticed by the pump
            self._pump.put(message, deadline_s=_SEND_S)


def import_optimizers() -> None:
    """Import what torch imports on first use, without its compiler, before peers wait for this worker."""
    defer_compiler()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)


def _prepare_process() -> None:
    """End with the parent, leave Ctrl-C to it, and log to standard error."""
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()


def _watch_parent(parent: int) -> None:
    """End with the parent even in the middle of a long computation."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(3)


def _exit_after(work: Callable[[], None]) -> NoReturn:
    """Work, then exit at once: an orderly shutdown of Python and torch would use a core for half a second."""
    code = 0
    try:
        work()
    except RavnestError as error:
        _log.error("%s", error)
        code = 1
    except SystemExit as error:
        code = int(error.code or 0)
    logging.shutdown()
    os._exit(code)


def run_worker(control: int) -> NoReturn:
    """Run a worker with the control link of this file descriptor, and exit."""
    _prepare_process()
    link = unix_link(socket.socket(fileno=control), LinkConfig(headers=FromAgent), peer="the agent")

    def work() -> None:
        start = link.receive(lambda header, lengths: [], deadline_s=_START_S)
        assert isinstance(start, StartWorker), "the agent's first message starts the worker"
        if start.core >= 0 and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {start.core})
        Worker(link, start).run()

    _exit_after(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", type=int, required=True)
    run_worker(parser.parse_args().control)


if __name__ == "__main__":
    main()
