"""The reconciler: from the desired assignment to messages for the worker, with files from a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ravnest.errors import ProgramError
from ravnest.node.client import Client, pinned_context
from ravnest.node.reconciler import Reconciler, fetch
from ravnest.node.storage import NodeStorage
from ravnest.protocol.commands import EndAfter, SaveState, StageFailed, StageReady, StateSaved
from ravnest.protocol.control import Assignment, AssignmentReleased, Blob, StageCommand, StageReport
from ravnest.protocol.worker import AssignStage, ReleaseStage
from tests.unit.node.fake_coordinator import TIMEOUT_S, FakeCoordinator
from tests.unit.transport.kinds import Members


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


class Node:
    """A reconciler whose messages to worker and coordinator are queued."""

    def __init__(self, coordinator: FakeCoordinator, directory: Path) -> None:
        self.coordinator, self.home = coordinator, NodeStorage(directory / "attic")
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.reports: asyncio.Queue[StageReport | AssignmentReleased] = asyncio.Queue()
        self.is_ready = asyncio.Event()
        self.is_ready.set()
        context = pinned_context(coordinator.members.authority.certificate_pem)
        self.connect: Callable[[], Client] = lambda: Client(coordinator.address, context)
        self.reconciler = Reconciler(
            self.home,
            self.connect,
            self.messages.put_nowait,
            self.reports.put_nowait,
            self.is_ready,
        )
        self.reconciler.max_weights_bytes = 1000

    def assignment(self, generation: int, **changes: Any) -> Assignment:
        assignment = Assignment(
            generation=generation, cluster="c1", stage=0, count=1, file=self.coordinator.add_blob(b"the stage"),
            config=self.coordinator.add_blob(b"the config"),
        )  # fmt: skip
        return msgspec.structs.replace(assignment, **changes)

    async def receive(self, kind: Any) -> Any:
        message = await asyncio.wait_for(self.messages.get(), TIMEOUT_S)
        assert isinstance(message, kind), message
        return message

    async def assign(self, generation: int) -> AssignStage:
        self.reconciler.set_target(self.assignment(generation))
        files = await self.receive(AssignStage)
        await asyncio.sleep(0)
        assert isinstance(files, AssignStage)
        return files

    async def failure(self) -> StageFailed:
        report = await asyncio.wait_for(self.reports.get(), TIMEOUT_S)
        assert isinstance(report, StageReport)
        assert isinstance(report.report, StageFailed)
        return report.report

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.home.directory.rglob("*") if path.is_file())


def contents(files: AssignStage) -> list[bytes]:
    return [Path(path).read_bytes() for path in (files.file, files.config, files.weights)]


def run(members: Members, directory: Path, scenario: Callable[[Node], Awaitable[None]]) -> None:
    async def running() -> None:
        async with FakeCoordinator(members) as coordinator:
            node = Node(coordinator, directory)
            await scenario(node)
            await node.reconciler.close()
            assert node.messages.empty()

    asyncio.run(running())


def test_an_assignment_is_fetched_and_assigned_once(members: Members, tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        weights = node.coordinator.add_blob(b"w" * 1000)
        assert node.reconciler.set_target(node.assignment(3, weights=weights))
        files = await node.receive(AssignStage)
        assert contents(files) == [b"the stage", b"the config", b"w" * 1000]
        assert files.coordinator == node.coordinator.address
        assert node.reconciler.holding == 3
        assert not node.reconciler.set_target(node.assignment(3, weights=weights))  # as after every reconnection

    run(members, tmp_path, scenario)


def test_another_assignment_replaces_it_and_its_files_are_removed(members: Members, tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.assign(1)
        assert node.reconciler.set_target(node.assignment(2))
        assert (await node.receive(ReleaseStage)).generation == 1
        assert (await node.receive(AssignStage)).assignment.generation == 2
        node.reconciler.stage_released(1)
        assert node.reconciler.holding == 2
        node.reconciler.set_target(None)
        assert (await node.receive(ReleaseStage)).generation == 2
        assert node.reconciler.holding == 0
        node.reconciler.stage_released(2)
        assert node.files == []

    run(members, tmp_path, scenario)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"file": Blob("0" * 64, 9)}, "no such blob"),
        ({"file": Blob("../../etc/passwd", 9)}, "not a SHA-256 digest"),
        ({"file": Blob("0" * 64, 2**40)}, "at most"),
        ({"file": Blob("0" * 64, -1)}, "at most"),
        ({"config": Blob("0" * 64, 2**30)}, "at most"),
        ({"weights": Blob("0" * 64, 1001)}, "at most 1000"),
    ],
    ids=str,
)
def test_rejected_files_are_reported(members: Members, tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    async def scenario(node: Node) -> None:
        node.reconciler.set_target(node.assignment(1, **change))
        assert complaint in (await node.failure()).reason
        assert node.reconciler.holding == 0
        assert node.files == []
        assert not node.reconciler.set_target(node.assignment(1, **change))  # it is not retried

    run(members, tmp_path, scenario)


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [(b"the stake", "digest of the file"), (b"the stage is longer", "longer than")],
    ids=str,
)
def test_a_file_that_differs_from_its_announcement_is_rejected(
    members: Members, tmp_path: Path, sent: bytes, complaint: str
) -> None:
    async def scenario(node: Node) -> None:
        assignment = node.assignment(1)
        node.coordinator.blobs[assignment.file.digest] = sent
        node.reconciler.set_target(assignment)
        assert complaint in (await node.failure()).reason

    run(members, tmp_path, scenario)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
@pytest.mark.parametrize("num_bytes", [10, 1_000_000])
def test_a_full_disk_is_not_a_link_error(members: Members, tmp_path: Path, num_bytes: int) -> None:
    async def scenario(node: Node) -> None:
        blob = node.coordinator.add_blob(bytes(num_bytes))
        async with node.connect() as client:
            with pytest.raises(ProgramError, match="cannot write"):
                await fetch(client, blob, Path("/dev/full"), max_bytes=num_bytes)

    run(members, tmp_path, scenario)


def test_an_interrupted_download_is_retried(members: Members, tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        node.coordinator.num_cut = 2
        await node.assign(1)
        assert node.coordinator.requests == ["blob"] * 4
        assert node.reports.empty()

    run(members, tmp_path, scenario)


def test_saved_weights_are_uploaded_before_they_are_reported(members: Members, tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.assign(4)
        node.reconciler.command(4, SaveState())
        sent = await node.receive(StageCommand)
        await asyncio.to_thread(Path(sent.command.path).write_bytes, b"trained")
        node.reconciler.stage_reported(StageReport(4, StateSaved(0)))
        assert (await node.reports.get()) == StageReport(4, StateSaved(0))
        assert node.coordinator.weights == {" 4 0": b"trained"}
        assert node.files == ["config", "stage"]

    run(members, tmp_path, scenario)


def test_commands_wait_for_their_assignment_and_others_are_dropped(members: Members, tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        node.is_ready.clear()
        node.reconciler.set_target(node.assignment(5))
        node.reconciler.command(5, EndAfter(7))
        node.reconciler.command(4, EndAfter(1))
        node.is_ready.set()
        await node.receive(AssignStage)
        assert (await node.receive(StageCommand)) == StageCommand(5, EndAfter(7))
        node.reconciler.command(6, EndAfter(1))

    run(members, tmp_path, scenario)


def test_a_worker_that_dies_before_it_releases_is_reported(members: Members, tmp_path: Path) -> None:
    """The coordinator sees the closed link of a killed worker first, and takes the stage away: it waits for the
    release, and wants to know the cause."""

    async def scenario(node: Node) -> None:
        await node.assign(1)
        node.reconciler.set_target(None)
        assert (await node.receive(ReleaseStage)).generation == 1
        node.reconciler.worker_lost("it was killed")
        assert (await node.failure()).reason == "it was killed"
        assert (await node.reports.get()) == AssignmentReleased(1)
        await node.assign(2)
        node.reconciler.set_target(None)
        await node.receive(ReleaseStage)
        node.reconciler.stage_released(2)
        assert (await node.reports.get()) == AssignmentReleased(2)
        node.reconciler.worker_lost("it was killed without a stage")
        assert node.reports.empty()

    run(members, tmp_path, scenario)


def test_a_lost_worker_fails_the_assignment(members: Members, tmp_path: Path) -> None:
    async def scenario(node: Node) -> None:
        await node.assign(1)
        node.reconciler.stage_reported(StageReport(1, StageReady(0)))
        assert (await node.reports.get()) == StageReport(1, StageReady(0))
        node.reconciler.worker_lost("it was killed")
        assert (await node.failure()).reason == "it was killed"
        assert node.reconciler.holding == 0
        assert (await node.receive(ReleaseStage)).generation == 1
        assert (await node.reports.get()) == AssignmentReleased(1)
        node.reconciler.worker_lost("it was killed again")
        assert node.reports.empty()

    run(members, tmp_path, scenario)
