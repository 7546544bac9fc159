"""Enrollment: only the ticket's coordinator gets the token, and a member does not need it again."""

from __future__ import annotations

import asyncio
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ravnest.errors import LinkError, RequestRejected
from ravnest.node.client import Client, member_context, pinned_context
from ravnest.node.membership import EnrollmentRequest, UntrustedCoordinator, enrol, known_identity
from ravnest.transport.ticket import Ticket
from tests.unit.node.fake_coordinator import FakeCoordinator, fingerprint_of
from tests.unit.transport.kinds import Members


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("strangers"))


def enrollment(ticket: Ticket, directory: Path) -> EnrollmentRequest:
    return EnrollmentRequest(ticket=ticket, name="attic", release="1", directory=directory)


def test_a_ticket_becomes_an_identity(members: Members, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeCoordinator(members) as coordinator:
            ticket = coordinator.ticket()
            identity = await enrol(enrollment(ticket, tmp_path / "attic"), coordinator.address)
            assert identity.name == "attic"
            assert coordinator.requests == ["authority", "enrol"]
            assert "PRIVATE" not in coordinator.enrolled[0]["request"]
            for path in (identity.key_path, identity.certificate_path, identity.authority_path):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert known_identity(ticket, tmp_path / "attic") == identity
            async with Client(coordinator.address, member_context(identity)) as client:
                await client.ask("PUT", "/v1/weights/1/0", data=b"x")
            assert coordinator.weights == {"attic 1 0": b"x"}

    asyncio.run(scenario())


def test_an_identity_of_another_run_or_an_expired_one_is_unused(
    members: Members, strangers: Members, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with FakeCoordinator(members) as coordinator:
            ticket = coordinator.ticket()
            await enrol(enrollment(ticket, tmp_path), coordinator.address)
            other = coordinator.ticket(fingerprint=fingerprint_of(strangers))
            assert known_identity(other, tmp_path) is None
            assert known_identity(ticket, tmp_path, now=datetime.now(UTC) + timedelta(days=400)) is None
            assert known_identity(ticket, tmp_path / "nowhere") is None

    asyncio.run(scenario())


@pytest.mark.parametrize("is_shown", [True, False], ids=["another authority", "the right authority without its key"])
def test_an_untrusted_server_does_not_get_the_token(
    members: Members, strangers: Members, tmp_path: Path, is_shown: bool
) -> None:
    """A server of another authority may even present the right certificate, without having its key."""

    async def scenario() -> None:
        shows = strangers if is_shown else members
        async with FakeCoordinator(strangers, shows=shows) as coordinator:
            ticket = coordinator.ticket(fingerprint=fingerprint_of(members))
            with pytest.raises(UntrustedCoordinator if is_shown else LinkError, match=r"ticket"):
                await enrol(enrollment(ticket, tmp_path), coordinator.address)
            assert coordinator.requests == ["authority"]

    asyncio.run(scenario())
    assert not list(tmp_path.iterdir())


def test_another_members_certificate_is_not_the_coordinators(members: Members, tmp_path: Path) -> None:
    async def scenario() -> None:
        mallory = Members(tmp_path / "mallory")
        mallory.authority = members.authority
        mallory._known["coordinator"] = mallory.make("mallory")
        async with FakeCoordinator(mallory) as coordinator:
            async with Client(coordinator.address, pinned_context(members.authority.certificate_pem)) as client:
                with pytest.raises(LinkError, match="not the coordinator"):
                    await client.ask("GET", "/v1/authority")
            assert not coordinator.requests

    asyncio.run(scenario())


def test_a_rejected_token_has_a_reason(members: Members, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeCoordinator(members) as coordinator:
            with pytest.raises(RequestRejected, match="expired"):
                await enrol(enrollment(coordinator.ticket(token="ab" * 16), tmp_path), coordinator.address)

    asyncio.run(scenario())


def test_a_kicked_member_gets_the_reason(members: Members) -> None:
    async def scenario() -> None:
        async with FakeCoordinator(members) as coordinator:
            coordinator.kicked.add("attic")
            async with Client(coordinator.address, member_context(members["attic"])) as client:
                with pytest.raises(RequestRejected, match="it was kicked") as rejected:
                    await client.connect("/v1/control", max_message_bytes=1000)
            assert rejected.value.status == 403

    asyncio.run(scenario())


def test_a_missing_coordinator_is_a_link_error(members: Members, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeCoordinator(members) as coordinator:
            ticket = coordinator.ticket()
        with pytest.raises(LinkError, match="does not answer"):
            await enrol(enrollment(ticket, tmp_path), ticket.addresses[0])

    asyncio.run(scenario())
