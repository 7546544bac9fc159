"""`ravnest dashboard` for a run in progress: its link on this machine, and its data elsewhere by a ticket."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path

import pytest

from ravnest.cli.join import node_page
from ravnest.cli.target import find_target
from ravnest.dashboard.listener import LocalListener
from ravnest.dashboard.site import Access
from ravnest.node.membership import TicketMembership
from ravnest.transport.ticket import Ticket
from tests.unit.coordinator.attacks import run
from tests.unit.dashboard.served import Messages, served

command = import_module("ravnest.cli.dashboard")


def test_a_run_in_progress_has_a_link_until_it_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server:
            (tmp_path / "run" / "coordinator.txt").write_text(f"{tmp_path / 'coordinator'}\n")
            assert await asyncio.to_thread(command._running_link, str(tmp_path / "run")) == server.dashboard.link
        assert await asyncio.to_thread(command._running_link, str(tmp_path / "run")) is None

    run(test())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_ticket_shows_a_run_of_another_machine(is_known: bool, tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, host="127.0.0.1", port=0, sockets=None) as server:
            server.connect("ann")
            ticket = server.service.ticket()
            if not is_known:
                server.service.coordinator.state.tokens.clear()
            target = find_target(ticket)
            listener = LocalListener(command.RemoteRun(target.connect, target.headers), Access.new())
            await listener.open()
            try:
                origin, _, token = listener.access.link().partition("/#token=")
                headers = {"Authorization": f"Bearer {token}"}
                async with server.client.get(f"{origin}/v1/stream", headers=headers) as answer:
                    if is_known:
                        assert "node/ann" in (await Messages(answer).next())["set"]
                    else:
                        assert (answer.status, "link" in (await answer.json())["error"]) == (502, True)
                async with server.client.get(f"{origin}/v1/nodes/ann", headers=headers) as answer:
                    assert answer.status == (200 if is_known else 401)
                async with server.client.get(f"{origin}/v1/access", headers=headers) as answer:
                    assert answer.status == (403 if is_known else 401), "a ticket makes a viewer"
                async with server.client.get(f"{origin}/v1/stream") as answer:
                    assert answer.status == 401, "the page of this machine has a token of its own"
            finally:
                await listener.close()

    run(test())


def test_a_node_shows_its_own_page_to_its_owner(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, host="127.0.0.1", port=0, sockets=None) as server:
            membership = TicketMembership(Ticket.parse(server.service.ticket()), "ann", "test", tmp_path / "node")
            await membership.join(lambda line: None)
            server.connect("ann")
            async with node_page(membership, tmp_path) as describe:
                line = describe("ann")
                path = tmp_path / "page.url"
                assert line == f"this node's page: the link is in {path}", "the output is no terminal"
                assert path.stat().st_mode & 0o077 == 0
                origin, _, fragment = path.read_text().strip().partition("/#token=")
                token, _, page = fragment.partition("/")
                assert page == "node/ann"
                headers = {"Authorization": f"Bearer {token}"}
                async with server.client.get(f"{origin}/v1/nodes/ann", headers=headers) as answer:
                    assert (answer.status, (await answer.json())["name"]) == (200, "ann")
                async with server.client.get(f"{origin}/v1/access", headers=headers) as answer:
                    assert answer.status == 403, "a lender is a viewer"
                async with server.client.get(f"{origin}/v1/nodes/ann") as answer:
                    assert answer.status == 401
            assert not path.exists()

    run(test())
