"""`ravnest join` as a process: its output, its exit, and its memory."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ravnest.protocol.control import Disconnect, LeaveRequest
from ravnest.transport.ticket import Ticket, new_token
from tests.unit.node.fake_coordinator import TIMEOUT_S, FakeCoordinator
from tests.unit.transport.kinds import Members

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def start(ticket: str, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ravnest", "join", ticket, *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def finish(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    return await process.wait(), output.decode().splitlines()


def test_one_node_leaves_by_ctrl_c_one_is_removed_and_one_ends_with_the_run(tmp_path: Path) -> None:
    members = Members(tmp_path / "members")

    async def life() -> None:
        async with FakeCoordinator(members) as coordinator:
            options = ("--data-dir", str(tmp_path / "nodes"), "--threads", "1", "--memory", "1GB")
            ticket = str(coordinator.ticket())
            attic = await start(ticket, "--name", "attic", "--max-upload", "80 Mbit/s", *options)
            cellar = await start(ticket, "--name", "cellar", *options)
            barn = await start(ticket, "--name", "barn", *options)
            sessions = {session.name: session for session in [await coordinator.admit() for _ in range(3)]}
            agent = psutil.Process(attic.pid)
            workers = [child for pc in (attic, cellar, barn) for child in psutil.Process(pc.pid).children()]
            async with asyncio.timeout(TIMEOUT_S):
                while workers[0].memory_info().rss < 100e6:  # noqa: ASYNC110  until it has imported torch
                    await asyncio.sleep(0.05)
            assert agent.memory_info().rss < 100e6

            await sessions["attic"].receive_heartbeat()  # its session is established
            attic.send_signal(signal.SIGINT)
            await sessions["attic"].receive(LeaveRequest)
            await sessions["attic"].send(Disconnect("it left", may_reconnect=False))
            await sessions["cellar"].send(Disconnect("it was kicked", may_reconnect=False))
            await sessions["barn"].send(Disconnect("all steps are done", is_run_over=True))
            code, lines = await finish(attic)
            assert code == 0
            measuring = ("measuring this PC", "waits until another agent has measured this PC")  # one at a time
            lines = [line for line in lines if line not in measuring]  # none, if another has done so before
            assert lines[0] == f"joining 127.0.0.1:{coordinator.address[1]}"
            assert lines[1] == "measuring the line to the coordinator"
            assert lines[2].startswith("joined as attic: 1.0 GB, ")
            assert lines[2].endswith("Mbit/s up")
            page = next((tmp_path / "nodes").glob("*-attic")) / "page.url"
            assert lines[3] == f"this node's page: the link is in {page}"
            assert not page.exists(), "the node has left"
            assert lines[4:] == ["leaving", "left"]
            code, lines = await finish(cellar)
            assert code == 1
            assert lines[-1] == "removed by the coordinator: it was kicked"
            code, lines = await finish(barn)
            assert code == 0
            assert lines[-1] == "the run has ended: thank you for lending this PC; it did not train"
            assert len(workers) == 3
            assert not any(worker.is_running() for worker in workers)
            for session in sessions.values():
                await session.close()

    asyncio.run(life())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["rav1-abc"], "ticket is incomplete"),
        (["{ticket}", "--memory", "a lot"], "not a size"),
        (["{ticket}", "--max-upload", "fast"], "not a rate"),
        (["{ticket}", "--name", "My PC"], "not a valid name"),
    ],
    ids=str,
)
def test_a_wrong_option_is_one_line(
    run_cli: Callable[..., tuple[int, str, str]], options: list[str], complaint: str
) -> None:
    ticket = str(Ticket(addresses=(("127.0.0.1", 1),), fingerprint="ab" * 32, token=new_token()))
    code, out, err = run_cli("join", *[option.format(ticket=ticket) for option in options])
    assert code == 2
    assert len((out + err).splitlines()) == 1
    assert complaint in out + err
