"""An agent with a real worker process and a fake coordinator."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from ravnest.errors import RavnestError
from ravnest.node.agent import Agent, AgentConfig, CoordinatorAway, Farewell
from ravnest.node.console import AgentConsole
from ravnest.node.membership import TicketMembership
from ravnest.node.session import DisconnectedByCoordinator
from ravnest.node.storage import NodeStorage, node_directory
from ravnest.protocol.commands import StageFailed
from ravnest.protocol.control import (
    AddressChanged,
    Assignment,
    DesiredAssignment,
    Disconnect,
    LeaveRequest,
    NodeProfile,
    NodeWork,
    StageReport,
    Waiting,
)
from ravnest.protocol.peer import PeerAddresses
from tests.unit.node.fake_coordinator import TIMEOUT_S, FakeCoordinator, NodeSession
from tests.unit.transport.kinds import Members
from tests.unit.worker.fleet import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROFILE = NodeProfile(memory_bytes=10**9, gflops=10.0)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


def workers() -> list[int]:
    return [
        p.pid for p in psutil.Process().children(recursive=True) if "ravnest.worker.process" in " ".join(p.cmdline())
    ]


def agent_config(coordinator: FakeCoordinator, directory: Path, **changes: Any) -> tuple[AgentConfig, TicketMembership]:
    ticket = coordinator.ticket(**changes)
    home = node_directory(directory, ticket.fingerprint, "attic")
    membership = TicketMembership(ticket, "attic", "1", home)
    return AgentConfig(release="1", home=NodeStorage(home), profile=PROFILE), membership


class RunningAgent:
    """An agent that runs, and the lines of its console."""

    def __init__(self, config: tuple[AgentConfig, TicketMembership]) -> None:
        self.lines: list[str] = []
        self._new: asyncio.Queue[str] = asyncio.Queue()
        self.agent = Agent(*config, AgentConsole(self._print))
        self.task = asyncio.create_task(self.agent.run())

    def _print(self, line: str) -> None:
        self.lines.append(line)
        self._new.put_nowait(line)

    async def printed(self, words: str) -> None:
        while words not in await asyncio.wait_for(self._new.get(), TIMEOUT_S):
            pass

    async def end(self) -> None:
        self.agent.leave()
        await asyncio.wait_for(self.task, TIMEOUT_S)


async def failure(session: NodeSession, generation: int) -> str:
    """Return why the assignment failed; the worker's address may change meanwhile."""
    while not isinstance(message := await session.receive(msgspec.Struct), StageReport):
        assert isinstance(message, AddressChanged)
    assert message.generation == generation
    assert isinstance(message.report, StageFailed)
    return message.report.reason


def assignment(coordinator: FakeCoordinator, job: Job, generation: int, file: bytes | None = None) -> Assignment:
    """Return stage 1 of 2, whose neighbour does not exist."""
    files = job.assign(1, generation, coordinator.address, {"missing": PeerAddresses()}, file)
    stage, config = Path(files.file).read_bytes(), Path(files.config).read_bytes()
    return msgspec.structs.replace(
        files.assignment, file=coordinator.add_blob(stage), config=coordinator.add_blob(config)
    )


def test_the_life_of_an_agent(members: Members, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")

    async def life() -> list[str]:
        async with FakeCoordinator(members) as coordinator:
            config = agent_config(coordinator, tmp_path / "nodes")
            running = RunningAgent(config)
            session = await coordinator.admit()
            assert session.name == "attic"
            assert session.hello is not None
            assert session.hello.held_generation == 0
            assert session.hello.profile.memory_bytes == 10**9
            (address, port), *_ = session.hello.addresses.addresses
            assert (address, config[0].home.port) == ("127.0.0.1", port)

            await session.send(DesiredAssignment(assignment(coordinator, job, 1, b"nonsense"), "a test"))
            assert "JSON" in await failure(session, 1)
            (worker,) = workers()  # the same as before

            await session.send(DesiredAssignment(assignment(coordinator, job, 2), "a test"))
            await session.close()
            again = await coordinator.admit()
            while again.hello is not None and again.hello.held_generation != 2:  # it may still have been fetching
                await again.close()
                again = await coordinator.admit()
            await again.send(DesiredAssignment(assignment(coordinator, job, 2), "as before"))
            os.kill(worker, signal.SIGKILL)
            assert "signal 9" in await failure(again, 2)
            moved = await again.receive(AddressChanged)
            assert moved.addresses.addresses[0] == (address, port)
            assert workers() != [worker]

            running.agent.leave()
            await again.receive(LeaveRequest)
            await again.send(Waiting("others take over its stage", 20.0))
            await running.printed("others take over its stage within 20 s")
            await again.send(Disconnect("it left", may_reconnect=False, contribution=NodeWork(batches=3)))
            farewell = await asyncio.wait_for(running.task, TIMEOUT_S)
            assert farewell == Farewell("it left", is_run_over=False, contribution=NodeWork(batches=3))
            await again.close()
            return running.lines

    lines = asyncio.run(life())
    assert workers() == []
    assert sorted(p.name for p in next((tmp_path / "nodes").iterdir()).iterdir()) == [
        "authority.pem", "certificate.pem", "key.pem", "lock", "port", "run", "worker.log",
    ]  # fmt: skip
    started = [line.split(":")[0] for line in lines]
    expected = [
        "measuring the line to the coordinator",
        "joined as attic",
        "stage 1 of 2 in cluster c1",
        "the worker process was killed by",
    ]
    places = [next(i for i, line in enumerate(started) if line.startswith(words)) for words in expected]
    assert places == sorted(places)
    assert started[-2] == "leaving"


def test_a_node_that_is_disconnected_for_good_ends(members: Members, tmp_path: Path) -> None:
    """One of the ticket's two addresses does not answer."""

    async def life() -> None:
        async with FakeCoordinator(members) as gone:
            pass
        async with FakeCoordinator(members) as coordinator:
            running = RunningAgent(agent_config(coordinator, tmp_path, addresses=(gone.address, coordinator.address)))
            session = await coordinator.admit()
            await session.send(Disconnect("reconnect"))
            await session.close()
            again = await coordinator.admit()
            await again.send(Disconnect("removed by the test", may_reconnect=False))
            with pytest.raises(DisconnectedByCoordinator, match="removed by the test"):
                await asyncio.wait_for(running.task, TIMEOUT_S)
            await again.close()

    asyncio.run(life())
    assert workers() == []


def test_an_agent_that_stays_joins_the_next_run_and_waits_for_a_coordinator_with_a_limit(
    members: Members, tmp_path: Path
) -> None:
    async def life() -> list[str]:
        async with FakeCoordinator(members) as coordinator:
            config, membership = agent_config(coordinator, tmp_path)
            running = RunningAgent((dataclasses.replace(config, stays=True, max_wait_s=1.0), membership))
            session = await coordinator.admit()
            await session.send(Waiting("waits for 2 more nodes"))
            await running.printed("waits for 2 more nodes")
            given = NodeWork(batches=7, samples=70, seconds=7200.0, sent_bytes=10**9, received_bytes=10**6)
            await session.send(Disconnect("all steps are done", is_run_over=True, contribution=given))
            await session.close()
            again = await coordinator.admit()
            await again.close()
        with pytest.raises(CoordinatorAway, match="for 1 s now: join again if the run continues"):
            await asyncio.wait_for(running.task, TIMEOUT_S)
        return running.lines

    lines = asyncio.run(life())
    given = "This PC trained 7 batches (70 samples) in 2 h, sent 1.0 GB and received 1.0 MB"
    place = lines.index(f"the run has ended: thank you. {given}")
    assert lines[place + 1].startswith("waiting for the next run with this ticket")
    assert lines[place + 2].startswith("joined as attic")
    assert workers() == []


def test_an_agent_that_never_reaches_its_coordinator_ends(members: Members, tmp_path: Path) -> None:
    async def life() -> None:
        async with FakeCoordinator(members) as coordinator:
            config, membership = agent_config(coordinator, tmp_path)
        running = RunningAgent((dataclasses.replace(config, max_wait_s=0.2), membership))
        with pytest.raises(CoordinatorAway, match="does not answer, for 200 ms now"):
            await asyncio.wait_for(running.task, TIMEOUT_S)

    asyncio.run(life())


def test_a_directory_has_one_agent(members: Members, tmp_path: Path) -> None:
    async def life() -> None:
        async with FakeCoordinator(members) as coordinator:
            config = agent_config(coordinator, tmp_path)
            with config[0].home.held(), pytest.raises(RavnestError, match="another agent"):
                await RunningAgent(config).task

    asyncio.run(life())


def test_an_agent_leaves_while_the_coordinator_does_not_answer(members: Members, tmp_path: Path) -> None:
    async def life() -> list[str]:
        async with FakeCoordinator(members) as coordinator:
            config = agent_config(coordinator, tmp_path)
        running = RunningAgent(config)
        await running.printed("does not answer")
        await running.end()
        return running.lines

    lines = asyncio.run(life())
    assert lines[0].startswith("joining 127.0.0.1")
    assert lines[-1] == "leaving"


def test_an_agent_ends_if_all_addresses_are_untrusted(members: Members, tmp_path: Path) -> None:
    async def life() -> None:
        async with FakeCoordinator(members) as coordinator:
            config = agent_config(coordinator, tmp_path, fingerprint="ab" * 32)
            with pytest.raises(RavnestError, match="not the coordinator of this ticket"):
                await RunningAgent(config).task
            assert not coordinator.enrolled

    asyncio.run(life())
