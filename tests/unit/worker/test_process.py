"""Worker processes, driven as an agent does: they connect, train, fail, and are free again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ravnest.protocol.commands import (
    EndAfter,
    LinkReport,
    LossReport,
    SaveState,
    StageFailed,
    StageReady,
    StateSaved,
    StepReport,
    StopStage,
)
from ravnest.protocol.control import AddressChanged, StageCommand, StageReport
from ravnest.protocol.peer import PeerAddresses
from ravnest.protocol.worker import EndpointOpened, LimitWorker, ReleaseStage, StageReleased, WorkerUnable
from ravnest.transport.stream import StreamLink
from tests.unit.transport.kinds import Members
from tests.unit.worker.fleet import Feeder, Job, Worker, acknowledged, ending, feed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


class Pair:
    """Two workers with open endpoints, and their feed; shared by all tests of this module."""

    link: StreamLink

    def __init__(self, members: Members, job: Job) -> None:
        self.job, self.feeder = job, Feeder(members["coordinator"])
        self.workers = [Worker(members[name], self.feeder.address) for name in ("anna", "bert")]
        self.addresses: list[PeerAddresses] = []
        for worker in self.workers:
            port = worker.receive(EndpointOpened).port
            self.addresses.append(worker.receive(AddressChanged).addresses)
            assert self.addresses[-1].addresses[0][1] == port
        self.generation = 0

    def assign(self, index: int, generation: int | None = None, file: bytes | None = None) -> None:
        other = 1 - index
        peers = {self.workers[other].name: self.addresses[other]}
        generation = generation or self.generation
        self.workers[index].send(self.job.assign(index, generation, self.feeder.address, peers, file))

    def send(self, command: EndAfter | SaveState | StopStage) -> None:
        for worker in self.workers:
            worker.send(StageCommand(self.generation, command))


@pytest.fixture(scope="module")
def pair(members: Members, job: Job) -> Iterator[Pair]:
    made = Pair(members, job)
    with ending(*made.workers, made.feeder):
        yield made
    assert [worker.process.returncode for worker in made.workers] == [0, -signal.SIGKILL]


@pytest.fixture
def training(pair: Pair) -> Iterator[Pair]:
    """Start a new generation; afterwards both workers are free again."""
    pair.generation += 1
    for index in (0, 1):
        pair.assign(index)
    pair.link = pair.feeder.accept()
    for worker, other in zip(pair.workers, reversed(pair.workers), strict=True):
        linked = worker.receive_report(LinkReport)
        assert (linked.peer, linked.kind) == (other.name, "direct")
        worker.receive_report(StageReady)
    yield pair
    for worker in pair.workers:
        if worker.process.poll() is None:
            worker.send(ReleaseStage(pair.generation))
            assert worker.receive(StageReleased).generation == pair.generation
    pair.link.close()


def test_two_workers_train_microbatches_and_save_their_weights(training: Pair, tmp_path: Path) -> None:
    first, last = training.workers
    leaves = training.job.program.feed(training.job.batch)
    losses = []
    for number in range(30):
        feed(training.link, leaves, number)
        assert acknowledged(training.link) == number
        losses.append(last.receive_report(LossReport).values[number][0])
    assert losses[-1] < losses[0] / 2  # type: ignore[operator]
    training.send(EndAfter(30))
    while first.receive_report(StepReport).metrics.updates < 30:
        pass
    for index, worker in enumerate(training.workers):
        worker.send(StageCommand(training.generation, SaveState(str(tmp_path / f"{index}"))))
        assert worker.receive_report(StateSaved).stage == index
    saved = {**load_file(tmp_path / "0"), **load_file(tmp_path / "1")}
    assert sorted(saved) == ["first.bias", "first.weight", "second.bias", "second.weight"]


def test_workers_can_train_another_generation(training: Pair) -> None:
    feed(training.link, training.job.program.feed(training.job.batch), 0)
    assert acknowledged(training.link) == 0


def test_a_stopped_neighbour_is_reported_as_a_consequence(training: Pair) -> None:
    first, last = training.workers
    first.send(ReleaseStage(training.generation))
    failed = last.receive(StageReport).report
    assert isinstance(failed, StageFailed)
    assert failed.is_consequence
    assert "anna" in failed.reason


def test_a_broken_feed_ends_the_stage_and_not_the_worker(training: Pair) -> None:
    training.link.close()
    failed = training.workers[0].receive(StageReport).report
    assert isinstance(failed, StageFailed)
    assert "coordinator" in failed.reason


@pytest.mark.parametrize("file", [b"nonsense", b"{}"], ids=["no JSON", "no stage"])
def test_a_bad_stage_file_is_rejected(pair: Pair, file: bytes) -> None:
    pair.generation += 1
    pair.assign(1, file=file)
    failed = pair.workers[1].receive(StageReport).report
    assert isinstance(failed, StageFailed)
    assert not failed.is_consequence
    assert pair.workers[1].receive(StageReleased).generation == pair.generation


def test_a_stage_trains_on_when_its_limits_change(training: Pair) -> None:
    for number in range(2):
        training.workers[1].send(LimitWorker(memory_bytes=4 * 10**9, threads=2 - number))
        feed(training.link, training.job.program.feed(training.job.batch), number)
        assert acknowledged(training.link) == number


def test_changed_limits_apply_to_the_next_stage(pair: Pair) -> None:
    pair.generation += 1
    pair.workers[1].send(LimitWorker(memory_bytes=1, threads=1))
    pair.assign(1)
    failed = pair.workers[1].receive(StageReport).report
    assert isinstance(failed, StageFailed)
    assert "at most 1 are allowed" in failed.reason
    assert pair.workers[1].receive(StageReleased).generation == pair.generation
    pair.workers[1].send(LimitWorker(memory_bytes=4 * 10**9, threads=1))


def test_an_assignment_is_released_while_it_connects_to_its_neighbour(pair: Pair) -> None:
    pair.generation += 1
    pair.assign(1)  # the other stage is not assigned
    pair.workers[1].send(ReleaseStage(pair.generation))
    assert pair.workers[1].receive(StageReleased).generation == pair.generation


def test_commands_for_another_generation_are_dropped(training: Pair) -> None:
    for worker in training.workers:
        worker.send(StageCommand(training.generation + 1, StopStage()))
        worker.send(ReleaseStage(training.generation + 1))
    feed(training.link, training.job.program.feed(training.job.batch), 0)
    assert acknowledged(training.link) == 0


def test_a_port_in_use_is_reported_and_a_worker_without_an_agent_ends(pair: Pair, members: Members) -> None:
    port = pair.addresses[0].addresses[0][1]
    third = Worker(members["clara"], pair.feeder.address, port=port, is_port_fixed=True)
    with ending(third):
        assert "cannot listen" in third.receive(WorkerUnable).reason
    fourth = Worker(members["clara"], pair.feeder.address, port=port)
    with ending(fourth):
        assert fourth.receive(EndpointOpened).port != port
        fourth.link.close()
        assert fourth.process.wait(60.0) == 0


def test_a_killed_neighbour_is_reported(training: Pair, members: Members) -> None:
    """Must be the last test: it kills a worker of the pair."""
    first, last = training.workers
    last.process.send_signal(signal.SIGKILL)
    last.process.wait(60.0)
    failed = first.receive(StageReport).report
    assert isinstance(failed, StageFailed)
    assert failed.is_consequence
