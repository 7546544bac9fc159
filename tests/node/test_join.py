"""`ravnest join` as a process: what it prints, how it leaves, how small it is."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import psutil
import pytest

from ravnest.core.control import Goodbye, Leave
from tests.net.kinds import Members
from tests.node.office import Office

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def start(ticket: str, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ravnest", "join", ticket, *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def finish(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    output, _ = await asyncio.wait_for(process.communicate(), 5.0)
    return await process.wait(), output.decode().splitlines()


def test_one_leaves_by_ctrl_c_and_one_is_sent_away(tmp_path: Path) -> None:
    members = Members(tmp_path / "members")

    async def life() -> None:
        async with Office(members) as office:
            given = ("--data-dir", str(tmp_path / "nodes"), "--threads", "1", "--memory", "1GB")
            ticket = str(office.ticket())
            attic = await start(ticket, "--name", "attic", "--max-upload", "80 Mbit/s", *given)
            cellar = await start(ticket, "--name", "cellar", *given)
            visits = {visit.name: visit for visit in (await office.welcome(), await office.welcome())}
            agent = psutil.Process(attic.pid)
            workers = [*agent.children(), *psutil.Process(cellar.pid).children()]
            assert agent.memory_info().rss < 100e6 < workers[0].memory_info().rss

            await visits["attic"].hear_beat()  # it knows that it is welcome
            attic.send_signal(signal.SIGINT)
            await visits["attic"].hear(Leave)
            await visits["attic"].tell(Goodbye("it left", again=False))
            await visits["cellar"].tell(Goodbye("it was kicked", again=False))
            code, lines = await finish(attic)
            assert code == 0
            assert lines[:3] == [
                f"joining 127.0.0.1:{office.address[1]}", "measuring this PC", "measuring the line to the coordinator",
            ]  # fmt: skip
            assert lines[3].startswith("joined as attic: 1.0 GB, ")
            assert lines[3].endswith("Mbit/s up")
            assert lines[4:] == ["leaving", "left"]
            code, lines = await finish(cellar)
            assert code == 1
            assert lines[-1] == "the coordinator sent this node away: it was kicked"
            assert len(workers) == 2
            assert not any(worker.is_running() for worker in workers)
            for visit in visits.values():
                await visit.close()

    asyncio.run(life())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["rav1-abc"], "not a whole ticket"),
        (["{ticket}", "--memory", "a lot"], "not a size"),
        (["{ticket}", "--max-upload", "fast"], "not a rate"),
        (["{ticket}", "--name", "My PC"], "not a valid name"),
    ],
    ids=str,
)
def test_a_slip_is_one_sentence(tmp_path: Path, options: list[str], complaint: str) -> None:
    async def life() -> None:
        async with Office(Members(tmp_path)) as office:
            ticket = str(office.ticket())
            process = await start(*[option.format(ticket=ticket) for option in options])
            code, lines = await finish(process)
            assert code == 2
            assert len(lines) == 1
            assert complaint in lines[0]
            assert not office.heard

    asyncio.run(life())
