"""From what is desired to what the worker is told, with files from a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ravnest.core.control import Blob, LetGo, Part, Report, Tell
from ravnest.core.errors import ProgramError
from ravnest.core.orders import EndAfter, Failed, Ready, Save, Saved
from ravnest.node.client import Client, pinned_context
from ravnest.node.convergence import Convergence
from ravnest.node.fetch import fetch
from ravnest.node.home import Home
from ravnest.node.talk import Free, Take
from tests.net.kinds import Members
from tests.node.office import PATIENCE_S, Office

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


class Node:
    """A convergence whose worker and coordinator keep what they hear."""

    def __init__(self, office: Office, directory: Path) -> None:
        self.office, self.home = office, Home(directory, "ab" * 32, "attic")
        self.told: asyncio.Queue[Any] = asyncio.Queue()
        self.reports: asyncio.Queue[Report | LetGo] = asyncio.Queue()
        self.is_ready = asyncio.Event()
        self.is_ready.set()
        context = pinned_context(office.members.authority.certificate_pem)
        self.connect: Callable[[], Client] = lambda: Client(office.address, context)
        self.convergence = Convergence(
            self.home,
            self.connect,
            self.told.put_nowait,
            self.reports.put_nowait,
            self.is_ready,
        )
        self.convergence.max_weights_bytes = 1000

    def part(self, generation: int, **changes: Any) -> Part:
        part = Part(
            generation=generation, cluster="c1", stage=0, count=1, file=self.office.keep(b"the stage"),
            brief=self.office.keep(b"the brief"),
        )  # fmt: skip
        return msgspec.structs.replace(part, **changes)

    async def hear(self, kind: Any) -> Any:
        said = await asyncio.wait_for(self.told.get(), PATIENCE_S)
        assert isinstance(said, kind), said
        return said

    async def take(self, generation: int) -> Take:
        self.convergence.desire(self.part(generation))
        take = await self.hear(Take)
        await asyncio.sleep(0)
        assert isinstance(take, Take)
        return take

    async def failure(self) -> Failed:
        said = await asyncio.wait_for(self.reports.get(), PATIENCE_S)
        assert isinstance(said, Report)
        assert isinstance(said.report, Failed)
        return said.report

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.home.directory.rglob("*") if path.is_file())


def contents(take: Take) -> list[bytes]:
    return [Path(path).read_bytes() for path in (take.file, take.brief, take.weights)]


def run(members: Members, directory: Path, scene: Callable[[Node], Awaitable[None]]) -> None:
    async def running() -> None:
        async with Office(members) as office:
            node = Node(office, directory)
            await scene(node)
            await node.convergence.close()
            assert node.told.empty()

    asyncio.run(running())


def test_a_part_is_fetched_and_given_once(members: Members, tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        weights = node.office.keep(b"w" * 1000)
        assert node.convergence.desire(node.part(3, weights=weights))
        take = await node.hear(Take)
        assert contents(take) == [b"the stage", b"the brief", b"w" * 1000]
        assert take.coordinator == node.office.address
        assert node.convergence.holding == 3
        assert not node.convergence.desire(node.part(3, weights=weights))  # as after every reconnection

    run(members, tmp_path, scene)


def test_another_part_takes_its_place_and_its_files_go(members: Members, tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        await node.take(1)
        assert node.convergence.desire(node.part(2))
        assert (await node.hear(Free)).generation == 1
        assert (await node.hear(Take)).part.generation == 2
        node.convergence.freed(1)
        assert node.convergence.holding == 2
        node.convergence.desire(None)
        assert (await node.hear(Free)).generation == 2
        assert node.convergence.holding == 0
        node.convergence.freed(2)
        assert node.files == []

    run(members, tmp_path, scene)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"file": Blob("0" * 64, 9)}, "no"),  # there is none
        ({"file": Blob("../../etc/passwd", 9)}, "not the digest"),
        ({"file": Blob("0" * 64, 2**40)}, "at most"),
        ({"file": Blob("0" * 64, -1)}, "at most"),
        ({"brief": Blob("0" * 64, 2**30)}, "at most"),
        ({"weights": Blob("0" * 64, 1001)}, "at most 1000"),
    ],
    ids=str,
)
def test_what_is_not_taken_is_told(members: Members, tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    async def scene(node: Node) -> None:
        node.convergence.desire(node.part(1, **change))
        assert complaint in (await node.failure()).reason
        assert node.convergence.holding == 0
        assert node.files == []
        assert not node.convergence.desire(node.part(1, **change))  # it is not tried again

    run(members, tmp_path, scene)


@pytest.mark.parametrize(
    ("sent", "complaint"), [(b"the stake", "digest differs"), (b"the stage is longer", "longer than")], ids=str
)
def test_a_file_that_is_not_what_was_announced(members: Members, tmp_path: Path, sent: bytes, complaint: str) -> None:
    async def scene(node: Node) -> None:
        part = node.part(1)
        node.office.blobs[part.file.digest] = sent
        node.convergence.desire(part)
        assert complaint in (await node.failure()).reason

    run(members, tmp_path, scene)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
@pytest.mark.parametrize("num_bytes", [10, 1_000_000])
def test_a_full_disk_is_no_broken_line(members: Members, tmp_path: Path, num_bytes: int) -> None:
    async def scene(node: Node) -> None:
        blob = node.office.keep(bytes(num_bytes))
        async with node.connect() as client:
            with pytest.raises(ProgramError, match="cannot keep"):
                await fetch(client, blob, Path("/dev/full"), max_bytes=num_bytes)

    run(members, tmp_path, scene)


def test_a_file_that_breaks_off_is_fetched_again(members: Members, tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        node.office.num_broken = 2
        await node.take(1)
        assert node.office.heard == ["blob"] * 4
        assert node.reports.empty()

    run(members, tmp_path, scene)


def test_saved_weights_go_to_the_coordinator_before_that_is_said(members: Members, tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        await node.take(4)
        node.convergence.order(4, Save())
        told = await node.hear(Tell)
        await asyncio.to_thread(Path(told.order.path).write_bytes, b"trained")
        node.convergence.reported(Report(4, Saved(0)))
        assert (await node.reports.get()) == Report(4, Saved(0))
        assert node.office.weights == {" 4 0": b"trained"}
        assert node.files == ["brief", "stage"]

    run(members, tmp_path, scene)


def test_orders_wait_for_their_part_and_others_are_dropped(members: Members, tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        node.is_ready.clear()
        node.convergence.desire(node.part(5))
        node.convergence.order(5, EndAfter(7))
        node.convergence.order(4, EndAfter(1))
        node.is_ready.set()
        await node.hear(Take)
        assert (await node.hear(Tell)) == Tell(5, EndAfter(7))
        node.convergence.order(6, EndAfter(1))

    run(members, tmp_path, scene)


def test_a_lost_worker_is_a_failed_part(members: Members, tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        await node.take(1)
        node.convergence.reported(Report(1, Ready(0)))
        assert (await node.reports.get()) == Report(1, Ready(0))
        node.convergence.worker_lost("it was killed")
        assert (await node.failure()).reason == "it was killed"
        assert node.convergence.holding == 0
        assert (await node.hear(Free)).generation == 1
        assert (await node.reports.get()) == LetGo(1)
        node.convergence.worker_lost("it was killed again")
        assert node.reports.empty()

    run(members, tmp_path, scene)
