"""Workers of a fleet, driven as an agent drives them: they find each other, train, fail, and are free again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ravnest.core.control import Moved, Report, Tell, Whereabouts
from ravnest.core.orders import EndAfter, Failed, Linked, Lost, Ready, Save, Saved, Stop, Updated
from ravnest.net.stream import StreamLink
from ravnest.node.talk import Free, Freed, Opened, Unable
from tests.net.kinds import Members
from tests.node.fleet import Feeder, Job, Worker, acknowledged, ending, feed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


class Pair:
    """Two workers with open doors, and who feeds them; lives for the whole file, as workers do."""

    link: StreamLink

    def __init__(self, members: Members, job: Job) -> None:
        self.job, self.feeder = job, Feeder(members["coordinator"])
        self.workers = [Worker(members[name], self.feeder.address) for name in ("anna", "bert")]
        self.wheres: list[Whereabouts] = []
        for worker in self.workers:
            port = worker.hear(Opened).port
            self.wheres.append(worker.hear(Moved).where)
            assert self.wheres[-1].addresses[0][1] == port
        self.generation = 0

    def take(self, index: int, generation: int | None = None, file: bytes | None = None) -> None:
        other = 1 - index
        peers = {self.workers[other].name: self.wheres[other]}
        generation = generation or self.generation
        self.workers[index].tell(self.job.take(index, generation, self.feeder.address, peers, file))

    def tell(self, order: EndAfter | Save | Stop) -> None:
        for worker in self.workers:
            worker.tell(Tell(self.generation, order))


@pytest.fixture(scope="module")
def pair(members: Members, job: Job) -> Iterator[Pair]:
    made = Pair(members, job)
    with ending(*made.workers, made.feeder):
        yield made
    assert [worker.process.returncode for worker in made.workers] == [0, -signal.SIGKILL]


@pytest.fixture
def training(pair: Pair) -> Iterator[Pair]:
    """A new generation, ready; at its end both are free again."""
    pair.generation += 1
    for index in (0, 1):
        pair.take(index)
    pair.link = pair.feeder.accept()
    for worker, other in zip(pair.workers, reversed(pair.workers), strict=True):
        linked = worker.hear_report(Linked)
        assert (linked.peer, linked.how) == (other.name, "direct")
        worker.hear_report(Ready)
    yield pair
    for worker in pair.workers:
        if worker.process.poll() is None:
            worker.tell(Free(pair.generation))
            assert worker.hear(Freed).generation == pair.generation
    pair.link.close()


def test_two_workers_train_what_they_were_fed_and_save_it(training: Pair, tmp_path: Path) -> None:
    root, leaf = training.workers
    leaves = training.job.program.feed(training.job.batch)
    losses = []
    for number in range(30):
        feed(training.link, leaves, number)
        assert acknowledged(training.link) == number
        losses.append(leaf.hear_report(Lost).values[number][0])
    assert losses[-1] < losses[0] / 2  # type: ignore[operator]
    training.tell(EndAfter(30))
    while root.hear_report(Updated).metrics.updates < 30:
        pass
    for index, worker in enumerate(training.workers):
        worker.tell(Tell(training.generation, Save(str(tmp_path / f"{index}"))))
        assert worker.hear_report(Saved).stage == index
    saved = {**load_file(tmp_path / "0"), **load_file(tmp_path / "1")}
    assert sorted(saved) == ["first.bias", "first.weight", "second.bias", "second.weight"]


def test_the_same_workers_take_another_part_at_another_place(training: Pair) -> None:
    feed(training.link, training.job.program.feed(training.job.batch), 0)
    assert acknowledged(training.link) == 0


def test_a_neighbour_that_stops_is_told_as_a_consequence(training: Pair) -> None:
    root, leaf = training.workers
    root.tell(Free(training.generation))
    failed = leaf.hear(Report).report
    assert isinstance(failed, Failed)
    assert failed.is_consequence
    assert "anna" in failed.reason


def test_a_feed_that_breaks_ends_the_part_and_not_the_worker(training: Pair) -> None:
    training.link.close()
    failed = training.workers[0].hear(Report).report
    assert isinstance(failed, Failed)
    assert "coordinator" in failed.reason


@pytest.mark.parametrize("file", [b"nonsense", b"{}"], ids=["no JSON", "no stage"])
def test_a_bad_stage_file_is_refused(pair: Pair, file: bytes) -> None:
    pair.generation += 1
    pair.take(1, file=file)
    failed = pair.workers[1].hear(Report).report
    assert isinstance(failed, Failed)
    assert not failed.is_consequence
    assert pair.workers[1].hear(Freed).generation == pair.generation


def test_a_part_is_taken_back_while_it_looks_for_its_neighbour(pair: Pair) -> None:
    pair.generation += 1
    pair.take(1)  # nobody takes the other part
    pair.workers[1].tell(Free(pair.generation))
    assert pair.workers[1].hear(Freed).generation == pair.generation


def test_an_order_of_another_generation_is_dropped(training: Pair) -> None:
    for worker in training.workers:
        worker.tell(Tell(training.generation + 1, Stop()))
        worker.tell(Free(training.generation + 1))
    feed(training.link, training.job.program.feed(training.job.batch), 0)
    assert acknowledged(training.link) == 0


def test_a_port_that_is_taken_is_said_and_a_worker_without_an_agent_leaves(pair: Pair, members: Members) -> None:
    port = pair.wheres[0].addresses[0][1]
    third = Worker(members["clara"], pair.feeder.address, port=port, is_port_asked=True)
    with ending(third):
        assert "cannot listen" in third.hear(Unable).reason
    fourth = Worker(members["clara"], pair.feeder.address, port=port)
    with ending(fourth):
        assert fourth.hear(Opened).port != port
        fourth.link.close()
        assert fourth.process.wait(20.0) == 0


def test_a_killed_neighbour_is_told(training: Pair, members: Members) -> None:
    """Last of all: there is one worker less after it."""
    root, leaf = training.workers
    leaf.process.send_signal(signal.SIGKILL)
    leaf.process.wait(10.0)
    failed = root.hear(Report).report
    assert isinstance(failed, Failed)
    assert failed.is_consequence
