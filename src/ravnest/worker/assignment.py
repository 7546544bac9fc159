"""Runs one assignment: reads the files of the stage, connects to its neighbours, and trains until stopped.

The files are untrusted: the stage is validated within the memory that the owner contributes, and the configuration's
settings for this machine (threads, core, paths) are replaced by the owner's. A run may be stopped at any moment; it
leaves nothing behind except a replica of the stage in the replica store, from which this or another node can resume.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from math import prod
from pathlib import Path

import msgspec
import torch

from ravnest.averaging.peer_link import PeerLinkConfig
from ravnest.averaging.shared_memory import SharedBuffer
from ravnest.core.config import require
from ravnest.errors import LinkError, ProgramError, RavnestError
from ravnest.graph import Stage, StageLimits, load
from ravnest.graph.device import device_name, has_bfloat16
from ravnest.pipeline.config import StageConfig
from ravnest.pipeline.loop import Loop
from ravnest.pipeline.state import trained, write_state
from ravnest.protocol.averaging import Message
from ravnest.protocol.commands import (
    AbortAveraging,
    Command,
    CommitAverage,
    FormRings,
    LinkReport,
    StartAveraging,
    StopStage,
)
from ravnest.protocol.control import Assignment, ReplicaInfo
from ravnest.protocol.peer import Peer
from ravnest.protocol.pipeline import Data, feed_purpose
from ravnest.protocol.worker import AssignStage
from ravnest.transport.link import Link, LinkConfig
from ravnest.worker.averaging import StageAveraging
from ravnest.worker.replication import ReplicaExchange
from ravnest.worker.resources import RING, WorkerResources
from ravnest.worker.stage_runner import SendReport, StageRunner, failure_of

__all__ = ["AssignmentRun"]

_CONNECT_S = 60.0
_CONNECT_RESUMING_S = 600.0  # neighbours first fetch the state that they resume from
_CONNECT_FEED_S = 20.0
_REPLICA_S = 600.0
_DEAD_AFTER_S = 5.0
_FLUSH_S = 1.0

_log = logging.getLogger("ravnest.worker")


class _Stopped(Exception):
    """The run was stopped before its stage ran."""


class AssignmentRun:
    """Run an assignment in the thread that calls `run`; `command`, `stop` and `write_replica` are for other threads."""

    def __init__(
        self, files: AssignStage, resources: WorkerResources, replicas: ReplicaExchange, report: SendReport
    ) -> None:
        self.assignment: Assignment = files.assignment
        self.replica: ReplicaInfo | None = None  # in the replica store, set at the end of the run
        self._files, self._resources, self._replicas, self._report = files, resources, replicas, report
        self._dialer = _LinkDialer()
        self._lock = threading.Lock()  # guards the next five
        self._early: list[Command] = []
        self._runner: StageRunner | None = None
        self._averaging: StageAveraging | None = None
        self._pending_replicas: set[Future[int]] = set()
        self._is_stopped = False

    def run(self) -> None:
        """Run until stopped; a failure is reported."""
        try:
            self._run()
        except _Stopped:
            pass
        except Exception as error:  # any failure is reported to the coordinator
            self._report_failure(error)

    def command(self, command: Command) -> None:
        """Pass a command on to the stage; one that arrives before the stage runs waits for it."""
        if isinstance(command, FormRings):
            self._resources.expect("rings", [peer.name for peer in command.peers])
        with self._lock:
            self._is_stopped |= isinstance(command, StopStage)
            if self._runner is None or self._averaging is None:
                self._early.append(command)
            else:
                self._pass_on(command)
        if isinstance(command, StopStage):
            self._dialer.stop()

    def stop(self) -> None:
        self.command(StopStage())

    def write_replica(self, path: Path, *, frozen: bool) -> int:
        """Write the state of the stage between two of its actions; return its number of updates.

        The stage waits until the file is written, because a second state might not fit in memory.
        """
        written: Future[int] = Future()

        def write(loop: Loop) -> None:
            if written.set_running_or_notify_cancel():
                try:
                    state = loop.trainer.state(whole=False, copies=False, frozen=frozen)
                    write_state(state, path)
                    written.set_result(state.updates)
                except (OSError, RavnestError) as error:
                    written.set_exception(error)

        with self._lock:
            if self._runner is None:
                raise RavnestError("the stage is not running")
            self._pending_replicas.add(written)
            self._runner.call_in_loop(write)
        try:
            return written.result(_REPLICA_S)
        except CancelledError as error:
            raise RavnestError("the stage ended before its replica was written") from error
        except TimeoutError as error:
            raise RavnestError(f"the stage wrote no replica within {_REPLICA_S:g} s") from error
        finally:
            self._pending_replicas.discard(written)

    def set_threads(self, threads: int) -> None:
        """Compute with `threads` threads from the next action on; a stage that is loading reads its limits later."""
        with self._lock:
            if self._runner is not None:
                self._runner.call_in_loop(lambda loop: torch.set_num_threads(threads))

    def wait(self, timeout_s: float, /) -> bool:
        """Wait briefly until the stage's own messages are sent."""
        with self._lock:
            runner = self._runner
        return True if runner is None else runner.wait(timeout_s)

    def _run(self) -> None:
        if self._is_stopped:
            raise _Stopped
        config = self._read_config()
        torch.set_num_threads(config.threads)
        resources = self._resources
        limits = StageLimits(
            batch=config.max_batch, state_bytes=resources.memory_bytes, value_bytes=resources.memory_bytes
        )
        file = Path(self._files.file)
        stage = load(file.read_bytes(), limits)
        self._check(stage)
        states = [*self._replicas.gather(stage, self.assignment.sources, file.parent), *self._files.states]
        config = msgspec.structs.replace(
            config, first_update=self.assignment.first_update, state=tuple(map(str, states))
        )
        before, after = self._connect()
        try:
            is_fed = self.assignment.before is None
            runner = StageRunner(
                stage, config, limits, before, after, self._report, resources.rate_limiter, is_fed=is_fed,
                processor_share=resources.processor_share,
            )  # fmt: skip
        except BaseException:
            before.close()
            if after is not None:
                after.close()
            raise
        link_config = PeerLinkConfig(turn=runner, rate_limiter=resources.rate_limiter)
        averaging = StageAveraging(
            resources.name,
            self._connect_ring,
            runner.call_in_loop,
            self._report,
            link_config,
            num_elements=_num_elements(stage),
        )
        averaging.start()
        flush_s = 0.0
        try:
            self._begin(runner, averaging)
            runner.run()
            flush_s = _FLUSH_S
            self._store_replica(runner)
        except LinkError as error:  # a lost neighbour must not lose the state of this stage
            self._store_replica(runner)
            self._report_failure(error)
        except Exception as error:  # reported before the links close: neighbours only notice the closed links
            self._report_failure(error)
        finally:
            with self._lock:
                self._runner = self._averaging = None  # frees their memory
                for pending in tuple(self._pending_replicas):
                    pending.cancel()
            averaging.close()
            runner.close(flush_s=flush_s)

    def _report_failure(self, error: Exception) -> None:
        if not self._is_stopped:
            self._report(failure_of(error, self._resources.device))

    def _store_replica(self, runner: StageRunner) -> None:
        """Write the final state to the replica store; without space on disk the run ends without it."""
        state = runner.state()
        if not state.updates:
            return
        store = self._resources.replica_store
        replica = ReplicaInfo(self.assignment.cluster, self.assignment.stage, state.updates)
        try:
            with store.writing() as path:
                write_state(state, path)
                store.put(path, replica)
            self.replica = replica
        except (OSError, RavnestError) as error:
            _log.warning("could not store a replica of stage %d: %s", replica.stage, error)

    def _read_config(self) -> StageConfig:
        try:
            config = msgspec.msgpack.decode(Path(self._files.config).read_bytes(), type=StageConfig)
        except ValueError as error:
            raise ProgramError(f"could not decode the configuration of the stage: {error}") from error
        threads = max(1, min(config.threads, self._resources.threads))
        device, autocast = self._resources.device, config.settings.autocast
        if autocast == "bf16" and not has_bfloat16(device):
            _log.info("%s (%s) has no bfloat16: computing in float16 with loss scaling", device, device_name(device))
            autocast = "fp16"
        settings = msgspec.structs.replace(config.settings, device=str(device), autocast=autocast)
        return msgspec.structs.replace(config, settings=settings, threads=threads, core=-1, weights=self._files.weights)

    def _check(self, stage: Stage) -> None:
        assigned = self.assignment
        if (stage.index, stage.count) != (assigned.stage, assigned.count):
            raise ProgramError(
                f"the file contains stage {stage.index} of {stage.count}, "
                f"assigned is stage {assigned.stage} of {assigned.count}"
            )
        require((assigned.before is None) == (stage.index == 0), "every stage but the first needs a peer before it")
        is_last = stage.index == stage.count - 1
        require((assigned.after is None) == is_last, "every stage but the last needs a peer after it")

    def _begin(self, runner: StageRunner, averaging: StageAveraging) -> None:
        """Pass commands on from now on, first those that arrived early."""
        with self._lock:
            self._runner, self._averaging = runner, averaging
            for command in self._early:
                self._pass_on(command)

    def _pass_on(self, command: Command) -> None:
        assert self._runner is not None
        assert self._averaging is not None
        if isinstance(command, FormRings | StartAveraging | CommitAverage | AbortAveraging):
            self._averaging.command(command)
        else:
            self._runner.command(command)

    def _connect(self) -> tuple[Link, Link | None]:
        """Connect to both neighbours at the same time."""
        dialer, before, after = self._dialer, self.assignment.before, self.assignment.after
        dialer.start("before", self._connect_feed if before is None else lambda: self._connect_peer(before))
        if after is not None:
            dialer.start("after", lambda: self._connect_peer(after))
        links = dialer.wait()
        return links["before"], links.get("after")

    def _connect_ring(self, peer: Peer, generation: int, buffer: SharedBuffer | None) -> Link:
        return self._connect_peer(peer, RING, LinkConfig(headers=Message, generation=generation), buffer)

    def _connect_peer(
        self,
        peer: Peer,
        purpose: str = "stage",
        config: LinkConfig | None = None,
        buffer: SharedBuffer | None = None,
    ) -> Link:
        is_resuming = purpose == "stage" and self.assignment.first_update > 0
        deadline_s = _CONNECT_RESUMING_S if is_resuming else _CONNECT_S
        config = config or self._link_config()
        connection = self._resources.connect_peer(peer, purpose, config, deadline_s=deadline_s, buffer=buffer)
        self._report(LinkReport(peer.name, connection.kind, connection.reason[:1000], connection.hint[:1000]))
        return connection.link

    def _connect_feed(self) -> Link:
        purpose = feed_purpose(self.assignment.cluster)
        return self._resources.connect_feed(purpose, self._link_config(), deadline_s=_CONNECT_FEED_S)

    def _link_config(self) -> LinkConfig:
        return LinkConfig(headers=Data, generation=self.assignment.generation, dead_after_s=_DEAD_AFTER_S)


def _num_elements(stage: Stage) -> int:
    return sum(prod(spec.shape) for spec in trained(stage).values())


class _LinkDialer:
    """Dial several links at once, each in its own thread; links that come after the end are closed."""

    def __init__(self) -> None:
        self._results: queue.SimpleQueue[tuple[str, Link | Exception] | None] = queue.SimpleQueue()
        self._links: dict[str, Link] = {}
        self._sides: set[str] = set()
        self._lock = threading.Lock()  # guards the next
        self._is_over = False

    def start(self, side: str, dial: Callable[[], Link]) -> None:
        self._sides.add(side)
        threading.Thread(target=self._dial, args=(side, dial), name=f"dial {side}", daemon=True).start()

    def stop(self) -> None:
        self._results.put(None)

    def wait(self) -> dict[str, Link]:
        """Return all links; raises the first failure, or `_Stopped`, after closing the other links."""
        try:
            while len(self._links) < len(self._sides):
                result = self._results.get()  # each dial has its own deadline
                if result is None:
                    raise _Stopped
                self._add(*result)
            return self._links
        except BaseException:
            self._give_up()
            raise

    def _dial(self, side: str, dial: Callable[[], Link]) -> None:
        result: Link | Exception
        try:
            result = dial()
        except Exception as error:  # raised again in the thread that waits
            result = error
        with self._lock:
            if not self._is_over:
                self._results.put((side, result))
            elif not isinstance(result, Exception):
                result.close()

    def _add(self, side: str, result: Link | Exception) -> None:
        if isinstance(result, LinkError):
            raise LinkError(f"could not connect to the stage {side} this one: {result}") from result
        if isinstance(result, Exception):
            raise result
        self._links[side] = result

    def _give_up(self) -> None:
        with self._lock:
            self._is_over = True
        while not self._results.empty():
            if (result := self._results.get()) is not None and not isinstance(result[1], Exception):
                result[1].close()
        for link in self._links.values():
            link.close()
