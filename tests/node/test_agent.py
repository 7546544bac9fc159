"""An agent with a real worker and a coordinator that does as the test says."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from ravnest.core.control import Desired, Goodbye, Leave, Moved, NodeProfile, Part, Report, Whereabouts
from ravnest.core.errors import RavnestError
from ravnest.core.orders import Failed
from ravnest.node.agent import Agent, AgentConfig
from ravnest.node.home import Home
from ravnest.node.say import Speaker
from ravnest.node.session import SentAway
from tests.net.kinds import Members
from tests.node.fleet import Job
from tests.node.office import PATIENCE_S, Office, Visit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROFILE = NodeProfile(memory_bytes=10**9, gflops=10.0)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


def workers() -> list[int]:
    return [p.pid for p in psutil.Process().children(recursive=True) if "ravnest.node.station" in " ".join(p.cmdline())]


def agent_config(office: Office, directory: Path, **changes: Any) -> AgentConfig:
    ticket = office.ticket(**changes)
    home = Home(directory, ticket.fingerprint, "attic")
    return AgentConfig(ticket=ticket, name="attic", release="1", home=home, profile=PROFILE)


class Lender:
    """An agent that runs, and what it has said."""

    def __init__(self, config: AgentConfig) -> None:
        self.lines: list[str] = []
        self._new: asyncio.Queue[str] = asyncio.Queue()
        self.agent = Agent(config, Speaker(self._say))
        self.running = asyncio.create_task(self.agent.run())

    def _say(self, line: str) -> None:
        self.lines.append(line)
        self._new.put_nowait(line)

    async def said(self, words: str) -> None:
        while words not in await asyncio.wait_for(self._new.get(), PATIENCE_S):
            pass

    async def end(self) -> None:
        self.agent.leave()
        await asyncio.wait_for(self.running, 5.0)


async def failure(visit: Visit, generation: int) -> str:
    """Why a part failed; the worker's door may be seen elsewhere meanwhile."""
    while not isinstance(said := await visit.hear(msgspec.Struct), Report):
        assert isinstance(said, Moved)
    assert said.generation == generation
    assert isinstance(said.report, Failed)
    return said.report.reason


def part(office: Office, job: Job, generation: int, file: bytes | None = None) -> Part:
    """Stage 1 of 2, whose neighbour is nowhere to be found."""
    take = job.take(1, generation, office.address, {"nobody": Whereabouts()}, file)
    stage, brief = Path(take.file).read_bytes(), Path(take.brief).read_bytes()
    return msgspec.structs.replace(take.part, file=office.keep(stage), brief=office.keep(brief))


def test_what_an_agent_goes_through(members: Members, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")

    async def life() -> list[str]:
        async with Office(members) as office:
            config = agent_config(office, tmp_path / "nodes")
            lender = Lender(config)
            visit = await office.welcome()
            assert visit.name == "attic"
            assert visit.hello is not None
            assert visit.hello.holding == 0
            assert visit.hello.profile.memory_bytes == 10**9
            (address, port), *_ = visit.hello.where.addresses
            assert (address, config.home.port) == ("127.0.0.1", port)

            await visit.tell(Desired(part(office, job, 1, b"nonsense"), "a test"))
            assert "JSON" in await failure(visit, 1)
            (worker,) = workers()  # the same as before

            await visit.tell(Desired(part(office, job, 2), "a test"))
            await visit.close()
            again = await office.welcome()
            while again.hello is not None and again.hello.holding != 2:  # it may have been fetching still
                await again.close()
                again = await office.welcome()
            await again.tell(Desired(part(office, job, 2), "as before"))
            os.kill(worker, signal.SIGKILL)
            assert "signal 9" in await failure(again, 2)
            moved = await again.hear(Moved)
            assert moved.where.addresses[0] == (address, port)
            assert workers() != [worker]

            lender.agent.leave()
            await again.hear(Leave)
            await again.tell(Goodbye("it left", again=False))
            await asyncio.wait_for(lender.running, 5.0)
            await again.close()
            return lender.lines

    lines = asyncio.run(life())
    assert workers() == []
    assert sorted(p.name for p in next((tmp_path / "nodes").iterdir()).iterdir()) == [
        "authority.pem", "certificate.pem", "key.pem", "lock", "port", "run", "worker.log",
    ]  # fmt: skip
    started = [line.split(":")[0] for line in lines]
    expected = ["measuring this PC", "joined as attic", "stage 1 of 2 in cluster c1", "the worker process was ended by"]
    places = [next(i for i, line in enumerate(started) if line.startswith(words)) for words in expected]
    assert places == sorted(places)
    assert started[-1] == "leaving"


def test_a_node_that_is_sent_away_for_good_ends(members: Members, tmp_path: Path) -> None:
    """Of the ticket's two addresses, one is out of use."""

    async def life() -> None:
        async with Office(members) as gone:
            pass
        async with Office(members) as office:
            lender = Lender(agent_config(office, tmp_path, addresses=(gone.address, office.address)))
            visit = await office.welcome()
            await visit.tell(Goodbye("the test wants it to come back"))
            await visit.close()
            again = await office.welcome()
            await again.tell(Goodbye("the test has enough of it", again=False))
            with pytest.raises(SentAway, match="enough of it"):
                await asyncio.wait_for(lender.running, PATIENCE_S)
            await again.close()

    asyncio.run(life())
    assert workers() == []


def test_one_agent_for_one_home(members: Members, tmp_path: Path) -> None:
    async def life() -> None:
        async with Office(members) as office:
            config = agent_config(office, tmp_path)
            with config.home.held(), pytest.raises(RavnestError, match="another agent"):
                await Lender(config).running

    asyncio.run(life())


def test_an_agent_leaves_while_nobody_answers(members: Members, tmp_path: Path) -> None:
    async def life() -> list[str]:
        async with Office(members) as office:
            config = agent_config(office, tmp_path)
        lender = Lender(config)
        await lender.said("does not answer")
        await lender.end()
        return lender.lines

    lines = asyncio.run(life())
    assert lines[0].startswith("joining 127.0.0.1")
    assert lines[-1] == "leaving"


def test_all_who_answer_are_strangers(members: Members, tmp_path: Path) -> None:
    async def life() -> None:
        async with Office(members) as office:
            config = agent_config(office, tmp_path, fingerprint="ab" * 32)
            with pytest.raises(RavnestError, match="not the coordinator of this ticket"):
                await Lender(config).running
            assert not office.enrolled

    asyncio.run(life())
