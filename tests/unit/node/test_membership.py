"""Membership of a local run, and the directory where nodes of one host find each other."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from ravnest.errors import LinkError
from ravnest.node.client import LocalClient
from ravnest.node.membership import LocalMembership
from ravnest.node.storage import host_sockets
from ravnest.protocol.control import NODE_HEADER
from ravnest.transport.local import control_socket

FINGERPRINT = "ab" * 32


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a short path, as sockets need."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this user's sockets."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"ravnest-{os.getuid()}"


def test_a_local_member_needs_no_enrollment(directory: Path) -> None:
    membership = LocalMembership("local-0", directory)
    lines: list[str] = []
    asyncio.run(membership.join(lines.append))
    membership.try_next_address()
    assert lines == []
    assert (membership.name, membership.identity, membership.num_addresses) == ("local-0", "", 1)
    assert membership.sockets == LocalMembership("local-1", directory).sockets == (directory, "local")


def test_a_local_member_sends_its_name_over_the_unix_socket(directory: Path) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.headers[NODE_HEADER])

    async def scenario() -> bytes:
        app = web.Application()
        app.router.add_get("/v1/status", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(control_socket(directory))).start()
        try:
            async with LocalMembership("local-0", directory).connect() as client:
                assert isinstance(client, LocalClient)
                return await client.ask("GET", "/v1/status")
        finally:
            await runner.cleanup()

    assert asyncio.run(scenario()) == b"local-0"


def test_a_local_run_without_a_coordinator_is_a_link_error(directory: Path) -> None:
    async def scenario() -> None:
        async with LocalMembership("local-0", directory).connect() as client:
            await client.ask("GET", "/v1/status")

    with pytest.raises(LinkError, match="does not answer"):
        asyncio.run(scenario())


def test_nodes_of_one_host_get_the_same_directory_and_name(base: Path) -> None:
    directory, host = host_sockets(FINGERPRINT)
    assert directory is not None
    assert directory.name == "abababab"
    assert directory.parent.parent == base
    assert len(host) == 32
    assert host_sockets(FINGERPRINT) == (directory, host)
    assert host_sockets("cd" * 32) == (directory.parent / "cdcdcdcd", host), "another run on the same host"
    assert base.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in directory.parent.iterdir()] == ["host"], "no drafts are left"


def test_hosts_without_a_shared_directory_have_other_names(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, host = host_sockets(FINGERPRINT)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base.parent / "other"))
    assert host_sockets(FINGERPRINT)[1] not in ("", host)


@pytest.mark.parametrize("mode", [0o770, 0o705, 0o777], ids=oct)
def test_a_directory_that_others_may_enter_is_not_used(base: Path, mode: int) -> None:
    base.mkdir()
    base.chmod(mode)
    assert host_sockets(FINGERPRINT) == (None, "")
    assert not list(base.iterdir())


def test_a_file_in_place_of_the_directory_is_not_used(base: Path) -> None:
    base.write_text("")
    assert host_sockets(FINGERPRINT) == (None, "")
