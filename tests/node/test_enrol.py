"""Joining: nobody but the ticket's coordinator sees the token, and who is a member does not need it again."""

from __future__ import annotations

import asyncio
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ravnest.core.errors import LinkError
from ravnest.net.ticket import Ticket
from ravnest.node.client import Client, Refused, member_context, pinned_context
from ravnest.node.enrol import Applicant, NotTheCoordinator, enrol, known_identity
from tests.net.kinds import Members
from tests.node.office import Office, fingerprint_of

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("strangers"))


def applicant(ticket: Ticket, directory: Path) -> Applicant:
    return Applicant(ticket=ticket, name="attic", release="1", directory=directory)


def test_a_ticket_becomes_an_identity(members: Members, tmp_path: Path) -> None:
    async def joining() -> None:
        async with Office(members) as office:
            ticket = office.ticket()
            identity = await enrol(applicant(ticket, tmp_path / "attic"), office.address)
            assert identity.name == "attic"
            assert office.heard == ["authority", "enrol"]
            assert "PRIVATE" not in office.enrolled[0]["request"]
            for path in (identity.key_path, identity.certificate_path, identity.authority_path):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert known_identity(ticket, tmp_path / "attic") == identity
            async with Client(office.address, member_context(identity)) as client:
                await client.ask("PUT", "/v1/weights/1/0", data=b"x")
            assert office.weights == {"attic 1 0": b"x"}

    asyncio.run(joining())


def test_an_identity_of_another_run_or_an_old_one_is_none(members: Members, strangers: Members, tmp_path: Path) -> None:
    async def joining() -> None:
        async with Office(members) as office:
            ticket = office.ticket()
            await enrol(applicant(ticket, tmp_path), office.address)
            other = office.ticket(fingerprint=fingerprint_of(strangers))
            assert known_identity(other, tmp_path) is None
            assert known_identity(ticket, tmp_path, now=datetime.now(UTC) + timedelta(days=400)) is None
            assert known_identity(ticket, tmp_path / "nowhere") is None

    asyncio.run(joining())


@pytest.mark.parametrize("is_shown", [True, False], ids=["shows another authority", "shows the right one it is not of"])
def test_nobody_else_hears_the_token(members: Members, strangers: Members, tmp_path: Path, is_shown: bool) -> None:
    """A stranger at the ticket's address, who may even show the right certificate without having its key."""

    async def joining() -> None:
        shows = strangers if is_shown else members
        async with Office(strangers, shows=shows) as office:
            ticket = office.ticket(fingerprint=fingerprint_of(members))
            with pytest.raises(NotTheCoordinator if is_shown else LinkError, match=r"ticket"):
                await enrol(applicant(ticket, tmp_path), office.address)
            assert office.heard == ["authority"]

    asyncio.run(joining())
    assert not list(tmp_path.iterdir())


def test_another_members_certificate_is_not_the_coordinators(members: Members, tmp_path: Path) -> None:
    async def asking() -> None:
        mallory = Members(tmp_path / "mallory")
        mallory.authority = members.authority
        mallory._known["coordinator"] = mallory.make("mallory")
        async with Office(mallory) as office:
            async with Client(office.address, pinned_context(members.authority.certificate_pem)) as client:
                with pytest.raises(LinkError, match="somebody else"):
                    await client.ask("GET", "/v1/authority")
            assert not office.heard

    asyncio.run(asking())


def test_a_refused_token_is_a_sentence(members: Members, tmp_path: Path) -> None:
    async def joining() -> None:
        async with Office(members) as office:
            with pytest.raises(Refused, match="not good any more"):
                await enrol(applicant(office.ticket(token="ab" * 16), tmp_path), office.address)

    asyncio.run(joining())


def test_a_member_that_was_kicked_hears_why(members: Members) -> None:
    async def asking() -> None:
        async with Office(members) as office:
            office.kicked.add("attic")
            async with Client(office.address, member_context(members["attic"])) as client:
                with pytest.raises(Refused, match="it was kicked") as refused:
                    await client.connect("/v1/control", max_message_bytes=1000)
            assert refused.value.status == 403

    asyncio.run(asking())


def test_nobody_there_is_a_link_error(members: Members, tmp_path: Path) -> None:
    async def joining() -> None:
        async with Office(members) as office:
            ticket = office.ticket()
        with pytest.raises(LinkError, match="does not answer"):
            await enrol(applicant(ticket, tmp_path), ticket.addresses[0])

    asyncio.run(joining())
