"""Averaging of one stage: links to its ring neighbours, a snapshot for each round, and applying the average.

Training continues meanwhile. The loop only copies its weights between two actions, and later moves them; the rest
happens in its own thread, which is interrupted when another attempt starts or the round is aborted. Each attempt of a
round starts from the same snapshot.

A ring averages flat float32 vectors. Tensors of any type are averaged as float32; whole numbers (the batch count of a
batch norm) are rounded when they are applied. Where a ring neighbour is on the same host, snapshot and result lie in
memory that it reads in place (`SharedBuffer`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ravnest.averaging.averager import Averager, RoundOutcome
from ravnest.averaging.contribution import Contribution, codec_error, digest, new_residual
from ravnest.averaging.outer_optimizer import Nesterov, OuterStep
from ravnest.averaging.peer_link import PeerLinkConfig
from ravnest.averaging.ring import RingSpec
from ravnest.averaging.session import AttemptKey
from ravnest.averaging.shared_memory import SharedBuffer, is_available
from ravnest.errors import LinkError, RavnestError
from ravnest.pipeline.loop import Loop
from ravnest.protocol.commands import (
    AbortAveraging,
    AverageApplied,
    AverageReady,
    AveragingFailed,
    AveragingStarted,
    CommitAverage,
    FormRings,
    RingPosition,
    RingsReady,
    StartAveraging,
)
from ravnest.protocol.peer import Peer
from ravnest.transport.link import Link
from ravnest.worker.stage_runner import SendReport

__all__ = ["Floats", "flatten", "unflatten", "StageAveraging"]

Floats = NDArray[np.float32]


def flatten(
    positions: Sequence[RingPosition],
    tensors: Mapping[str, Tensor],
    allocate: Callable[[int, int], Floats] | None = None,
) -> dict[int, Floats]:
    """Copy the tensors of each ring into one vector; `allocate(ring, num_elements)` gives its memory."""
    vectors: dict[int, Floats] = {}
    for position in positions:
        missing = [name for name in position.targets if name not in tensors]
        if missing:
            raise RavnestError(f"ring {position.ring} averages {missing[0]}, which this stage does not own")
        num_elements = sum(tensors[name].numel() for name in position.targets)
        vector = np.empty(num_elements, np.float32) if allocate is None else allocate(position.ring, num_elements)
        for name, lo, hi in _slices(position, tensors):
            torch.from_numpy(vector[lo:hi]).copy_(tensors[name].detach().reshape(-1))
        vectors[position.ring] = vector
    return vectors


def unflatten(
    positions: Sequence[RingPosition], vectors: Mapping[int, Floats], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """View the vectors as tensors of these shapes, without a copy."""
    return {
        name: torch.from_numpy(vectors[position.ring][lo:hi]).view(tensors[name].shape)
        for position in positions
        for name, lo, hi in _slices(position, tensors)
    }


def _slices(position: RingPosition, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
    end = 0
    for name in position.targets:
        start, end = end, end + tensors[name].numel()
        yield name, start, end


RingCommand = FormRings | StartAveraging | CommitAverage | AbortAveraging
RoundReport = AveragingStarted | AverageReady | AveragingFailed | AverageApplied

_SNAPSHOT_S = 600.0
_RECONNECT_S = 5.0
_POLL_S = 0.1  # how often a wait for links checks for newer commands


@dataclass
class _Round:
    """State of the current round."""

    number: int
    updates: int  # of the snapshot
    snapshot: dict[int, Floats]
    results: dict[int, Floats]
    attempt: int = -1
    outer: str = "plain"


@dataclass
class _Rings:
    """State that lasts as long as the rings: links, memory, residuals of codecs, and the outer optimizer."""

    formation: FormRings
    averager: Averager
    buffer: SharedBuffer | None = None
    vectors: dict[tuple[str, int], Floats] = field(default_factory=dict)
    residuals: dict[int, Floats] = field(default_factory=dict)
    outer_steps: dict[int, OuterStep] = field(default_factory=dict)

    def vector(self, use: str, ring: int, num_elements: int) -> Floats:
        """Return the memory of a ring's snapshot or result, the same in every round."""
        if (use, ring) not in self.vectors:
            new = np.empty(num_elements, np.float32) if self.buffer is None else self.buffer.floats(num_elements)
            self.vectors[use, ring] = new
        return self.vectors[use, ring]

    def close(self) -> None:
        self.averager.close()
        if self.buffer is not None:
            self.buffer.close()


class StageAveraging:
    """Executes averaging commands in its own thread; `command` is for any thread.

    `connect` makes a link to a ring neighbour, `call_in_loop` calls a function in the training loop. `num_elements` is
    an upper bound on the numbers that the stage averages.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[Peer, int, SharedBuffer | None], Link],
        call_in_loop: Callable[[Callable[[Loop], None]], None],
        report: SendReport,
        config: PeerLinkConfig | None = None,
        *,
        num_elements: int = 0,
    ) -> None:
        self._num_elements = num_elements
        self._name, self._connect, self._call_in_loop, self._send_report = name, connect, call_in_loop, report
        self._config = config or PeerLinkConfig()
        self._commands: queue.SimpleQueue[RingCommand | None] = queue.SimpleQueue()
        self._rings: _Rings | None = None
        self._round: _Round | None = None
        self._closed_round = 0  # rounds up to this one are never started again
        self._reports: list[RoundReport] = []  # of the latest round
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rings", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def command(self, command: RingCommand) -> None:
        """Queue a command; aborts the current attempt if the command makes it obsolete."""
        self._commands.put(command)
        rings = self._rings
        if rings is not None and not isinstance(command, CommitAverage):
            rings.averager.abort()

    def close(self) -> None:
        self._stopping.set()
        self._commands.put(None)
        rings = self._rings
        if rings is not None:
            rings.averager.abort()
        if self._thread.is_alive():
            self._thread.join(20.0)

    def _run(self) -> None:
        while (command := self._commands.get()) is not None and not self._stopping.is_set():
            try:
                self._execute(command)
            except (RavnestError, ValueError) as error:
                if isinstance(command, StartAveraging):
                    self._report(AveragingFailed(command.round, command.attempt, str(error)[:500]))
        self._close_rings()

    def _execute(self, command: RingCommand) -> None:
        match command:
            case FormRings():
                self._form(command)
            case StartAveraging():
                self._average(command)
            case CommitAverage(round=number, attempt=attempt):
                self._commit(number, attempt)
            case AbortAveraging(round=number):
                if self._round is not None and self._round.number <= number:
                    self._round = None
                self._closed_round = max(self._closed_round, number)

    def _report(self, report: RoundReport) -> None:
        self._reports = [*(earlier for earlier in self._reports if earlier.round == report.round), report]
        self._send_report(report)

    def _report_again(self, number: int) -> None:
        """Repeat the reports of a round: a repeated command means that they may have been lost."""
        for report in self._reports:
            if report.round == number:
                self._send_report(report)

    # links

    def _form(self, formation: FormRings) -> None:
        """Connect to all neighbours at once; retry until that succeeds or another command arrives."""
        if self._rings is not None and self._rings.formation == formation:
            self._send_report(RingsReady(formation.generation))
            return
        self._close_rings()
        while self._commands.empty() and not self._stopping.is_set():
            buffer = self._new_buffer(formation)
            links = self._connect_all(formation, buffer)
            if links is not None:
                averager = Averager(links, self._config)
                averager.__enter__()
                self._rings = _Rings(formation, averager, buffer)
                self._send_report(RingsReady(formation.generation))
                return
            if buffer is not None:
                buffer.close()
            if self._commands.empty():
                self._stopping.wait(_RECONNECT_S)

    def _new_buffer(self, formation: FormRings) -> SharedBuffer | None:
        """Return memory for snapshots and results that neighbours on this host can read; pages cost when used."""
        if not self._num_elements or not is_available():
            return None
        return SharedBuffer(2 * (4 * self._num_elements + 64 * (len(formation.seats) + 1)))

    def _connect_all(self, formation: FormRings, buffer: SharedBuffer | None) -> dict[str, Link] | None:
        """Return all links; None, with every link closed, if one failed or another command arrived.

        A neighbour that already forms newer rings never answers, so this does not wait for the deadline.
        """
        calls = {
            peer.name: _start_connecting(self._connect, peer, formation.generation, buffer) for peer in formation.peers
        }
        waiting = set(calls.values())
        while waiting and self._commands.empty() and not self._stopping.is_set():
            done, waiting = wait(waiting, _POLL_S, FIRST_EXCEPTION)
            if any(call.exception() is not None for call in done):
                break
        if not waiting and all(call.exception() is None for call in calls.values()):
            return {name: call.result() for name, call in calls.items()}
        for call in calls.values():
            call.add_done_callback(_close_link)
        errors = [error for call in calls.values() if call.done() and (error := call.exception()) is not None]
        if errors and not isinstance(errors[0], LinkError):
            raise errors[0]
        return None

    def _close_rings(self) -> None:
        rings, self._rings, self._round = self._rings, None, None
        if rings is not None:
            rings.close()

    # rounds

    def _average(self, command: StartAveraging) -> None:
        rings = self._rings
        if rings is None or command.generation != rings.formation.generation or command.round <= self._closed_round:
            self._report_again(command.round)
            return
        if self._round is None or self._round.number != command.round:
            self._start_round(command.round, rings)
        current = self._round
        assert current is not None
        if command.attempt <= current.attempt:
            self._report_again(command.round)
            return
        current.attempt, current.outer = command.attempt, command.outer
        contributions = []
        if self._name in command.weights:
            contributions = [self._contribution(rings, current, seat, command) for seat in rings.formation.seats]
        key = AttemptKey(command.round, command.attempt)
        outcome = rings.averager.run(key, contributions, deadline_s=command.within_s)
        self._report_outcome(command, contributions, outcome)

    def _start_round(self, number: int, rings: _Rings) -> None:
        """Take a snapshot between two actions of the loop, so that all tensors are of one version."""
        taken: Future[tuple[int, dict[int, Floats]]] = Future()

        def take(loop: Loop) -> None:
            try:
                vectors = flatten(
                    rings.formation.seats,
                    loop.trainer.weights(frozen=False),
                    lambda ring, count: rings.vector("snapshot", ring, count),
                )
                taken.set_result((loop.schedule.updates, vectors))
            except RavnestError as error:
                taken.set_exception(error)

        self._call_in_loop(take)
        updates, snapshot = taken.result(_SNAPSHOT_S)
        results = {ring: rings.vector("result", ring, vector.size) for ring, vector in snapshot.items()}
        self._round = _Round(number, updates, snapshot, results)
        self._report(AveragingStarted(number))

    def _contribution(
        self, rings: _Rings, current: _Round, position: RingPosition, command: StartAveraging
    ) -> Contribution:
        ring, members = position.ring, tuple(name for name in position.members if name in command.weights)
        spec = RingSpec(
            id=ring, members=members, me=self._name, weights=tuple(command.weights[name] for name in members),
            codec=command.codec, chunk_elements=command.piece_elements,
        )  # fmt: skip
        vector = current.snapshot[ring]
        if ring not in rings.residuals or not rings.residuals[ring].size:  # the previous codec may have had none
            rings.residuals[ring] = new_residual(spec, vector.size)
        return Contribution(spec, vector, current.results[ring], rings.residuals[ring])

    def _report_outcome(
        self, command: StartAveraging, contributions: list[Contribution], outcome: RoundOutcome
    ) -> None:
        if outcome.failed:
            failure = next(iter(outcome.failed.values()))
            self._report(AveragingFailed(command.round, command.attempt, str(failure)[:500], failure.member))
            return
        plain_bytes = sum(2 * (len(c.spec.members) - 1) * c.result.nbytes // len(c.spec.members) for c in contributions)
        self._report(
            AverageReady(
                round=command.round, attempt=command.attempt,
                digests={c.spec.id: digest(c.result) for c in contributions},
                seconds=outcome.seconds, sent_bytes=outcome.sent_bytes,
                saved_bytes=max(0, plain_bytes - outcome.sent_bytes), codec_error=codec_error(contributions),
            )
        )  # fmt: skip

    def _commit(self, number: int, attempt: int) -> None:
        current, rings = self._round, self._rings
        if rings is None or current is None or (current.number, current.attempt) != (number, attempt):
            self._report_again(number)
            return
        self._round, self._closed_round = None, number
        results = {ring: result.copy() for ring, result in current.results.items()}  # the next round reuses the memory
        if current.outer != "plain":
            for ring, result in results.items():
                rings.outer_steps.setdefault(ring, OuterStep(Nesterov())).apply(result)
        positions = rings.formation.seats

        def apply(loop: Loop) -> None:
            tensors, is_idle = loop.trainer.weights(frozen=False), loop.schedule.in_flight == 0
            if is_idle and loop.schedule.updates == current.updates:
                loop.trainer.set_weights(unflatten(positions, results, tensors))  # bit for bit
            else:
                for ring, result in results.items():
                    np.subtract(result, current.snapshot[ring], out=result)
                loop.trainer.shift(unflatten(positions, results, tensors), now=is_idle)
            self._report(AverageApplied(number))

        self._call_in_loop(apply)


def _start_connecting(
    connect: Callable[[Peer, int, SharedBuffer | None], Link], peer: Peer, generation: int, buffer: SharedBuffer | None
) -> Future[Link]:
    """Connect in a daemon thread."""
    connected: Future[Link] = Future()

    def run() -> None:
        try:
            connected.set_result(connect(peer, generation, buffer))
        except Exception as error:  # raised again by `result`
            connected.set_exception(error)

    threading.Thread(target=run, name=f"connect {peer.name}", daemon=True).start()
    return connected


def _close_link(call: Future[Link]) -> None:
    if call.exception() is None:
        call.result().close()
