"""Who comes in, and who does not: tokens, fingerprints, certificates, names, clocks; and the others train on."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ravnest.coordinator.people import requester_identity
from ravnest.core.control import Desired, Goodbye, Report, Welcome
from ravnest.core.errors import LinkError
from ravnest.core.orders import Failed
from ravnest.net.addresses import Address
from ravnest.net.hello import FEED_PROTOCOL, RELAY_PROTOCOL, Observe, encode_note
from ravnest.net.identity import Identity, make_key, make_request, save_identity
from ravnest.net.ticket import Ticket, new_token
from ravnest.net.tunnel import relay_context
from ravnest.node.client import Client, Refused, blind_context, member_context, pinned_context
from ravnest.node.enrol import NotTheCoordinator
from tests.coordinator.attacks import Caller, House, anonymous, at_work, house, run, stranger
from tests.coordinator.guests import Feed, Guest, enrolled, feed_context

pytestmark = pytest.mark.timeout(60)

DAY_S = 86400.0
CLOSED = (OSError, EOFError, LinkError)


def token_ticket(found: House, token: str) -> str:
    return str(Ticket(addresses=(found.address,), fingerprint=found.service.people.fingerprint, token=token))


def test_tokens_that_are_wrong_expired_or_used_up_let_nobody_in(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            service, nodes = found.service, tmp_path / "nodes"
            with pytest.raises(Refused, match="not known here"):
                await enrolled(token_ticket(found, new_token()), "mallory", nodes)

            expired = service.new_ticket(0.05, None)
            until_s = found.coordinator.now_s() + 0.05
            await found.until(lambda: found.coordinator.now_s() >= until_s, "the ticket has expired")
            with pytest.raises(Refused, match="has expired"):
                await enrolled(expired, "mallory", nodes)

            once = service.new_ticket(3600.0, 1)
            await enrolled(once, "carl", nodes)
            with pytest.raises(Refused, match="used up"):
                await enrolled(once, "mallory", nodes)

            for reason in ("not known here", "has expired", "used up"):
                await found.says("refused 127.0.0.1", reason)
            assert set(found.coordinator.state.members) == {"ann", "bob", "carl"}
            assert not (nodes / "mallory").exists()

    run(test())


@contextlib.asynccontextmanager
async def impostor(directory: Path, shows: bytes | None) -> AsyncIterator[tuple[Address, bytearray]]:
    """A server of another authority that shows a certificate, its own or what it was given; and all it hears."""
    identity = stranger(directory, "coordinator")
    heard = bytearray()
    page = shows or identity.authority_path.read_bytes()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                heard.extend(data)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate_path, identity.key_path)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname(), heard


@pytest.mark.parametrize("shows_the_real_one", [False, True])
def test_an_impostor_never_hears_the_token(tmp_path: Path, shows_the_real_one: bool) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            real = Ticket.parse(found.ticket)
            shown = found.service.people.authority_pem if shows_the_real_one else None
            async with impostor(tmp_path / "impostor", shown) as (address, heard):
                ticket = Ticket(addresses=(address[:2],), fingerprint=real.fingerprint, token=real.token)
                sentence = "somebody else than the coordinator" if shows_the_real_one else "ticket was not shown"
                with pytest.raises((NotTheCoordinator, LinkError), match=sentence):
                    await enrolled(str(ticket), "carl", tmp_path / "nodes")
                assert b"/v1/authority" in heard, "it was asked who it is"
                assert b"enrol" not in heard
                assert real.token.encode() not in heard
            assert (await enrolled(found.ticket, "carl", tmp_path / "nodes")).name == "carl"

    run(test())


async def refused_everywhere(found: House, identity: Identity, cluster: str = "c1-0") -> None:
    """At the conversation, the feed and the relay."""
    with pytest.raises((LinkError, Refused)):
        async with Guest(identity, found.address) as guest:
            await guest.hears(Welcome)
    with pytest.raises(CLOSED):
        await Feed.dial(found.address, feed_context(identity), 1, cluster)
    assert await observe(found, relay_context(identity)) == b""


async def observe(found: House, context: ssl.SSLContext) -> bytes:
    """What the relay answers to the simplest question."""
    async with Caller(found.address, context) as caller:
        await caller.say(encode_note(Observe()))
        with contextlib.suppress(*CLOSED):
            return await caller.reader.read(1000)
    return b""


def test_a_strangers_certificate_opens_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            await refused_everywhere(found, stranger(tmp_path / "stranger", trusts=found.service.people.authority_pem))
            await found.says("refused 127.0.0.1", "handshake failed", "CERTIFICATE_VERIFY_FAILED")
            assert await observe(found, relay_context(found.guests["ann"].identity)) != b"", "a member is answered"

    run(test())


def test_a_certificate_of_ours_that_nobody_remembers_opens_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            people, key = found.service.people, make_key()
            certificate = people.sign(make_request(key, "ghost"), "ghost")
            await refused_everywhere(found, save_identity(tmp_path / "ghost", key, certificate, people.authority_pem))
            await found.says("refused", "ghost is not known here")
            await found.says("refused ghost at 127.0.0.1", "ghost is no root of a cluster")

    run(test())


def test_without_a_certificate_there_is_only_a_sentence(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            async with Client(found.address, blind_context()) as client:
                for method, path in [
                    ("GET", "/v1/control"), ("GET", "/v1/blobs/0"), ("PUT", "/v1/weights/1/0"), ("GET", "/v1/line"),
                ]:  # fmt: skip
                    with pytest.raises(Refused, match="for members"):
                        await client.ask(method, path)
                for path in ("/v1/kick", "/v1/tickets"):
                    with pytest.raises(Refused, match="only the requester"):
                        await client.ask("POST", path, json={"node": "ann"})
                token = Ticket.parse(found.ticket).token
                with pytest.raises(Refused, match="show a ticket"):
                    await client.ask("GET", "/v1/status", headers={"Authorization": f"Basic {token}"})
            with pytest.raises(CLOSED):
                await Feed.dial(found.address, anonymous(FEED_PROTOCOL), 1, "c1-0")
            assert await observe(found, anonymous(RELAY_PROTOCOL)) == b""
            for reason in ("for members", "only the requester", "show a ticket", "no certificate of this coordinator"):
                await found.says("refused", reason)

    run(test())


def test_a_member_is_no_requester(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            async with Client(found.address, member_context(found.guests["bob"].identity)) as client:
                with pytest.raises(Refused, match="only the requester"):
                    await client.ask("POST", "/v1/kick", json={"node": "ann"})
            for name in ("requester", "coordinator"):
                with pytest.raises(Refused, match=f"no node is called {name}"):
                    await found.enrol(name)
            assert found.coordinator.state.members["ann"].kicked is None

    run(test())


async def kick(found: House, name: str) -> None:
    requester = requester_identity(found.service.config.directory)
    async with Client(found.address, member_context(requester)) as client:
        await client.ask("POST", "/v1/kick", json={"node": name, "reason": "it was rude"})


async def enrol_again(found: House, identity: Identity) -> None:
    """With the key it has."""
    key = serialization.load_pem_private_key(identity.key_path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    asked = {
        "token": Ticket.parse(found.ticket).token, "name": "somebody", "request": make_request(key, "a").decode(),
    }  # fmt: skip
    async with Client(found.address, pinned_context(found.service.people.authority_pem)) as client:
        await client.ask("POST", "/v1/enrol", json=asked)


def test_a_kicked_node_is_out_for_good_and_the_others_form_anew(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path, ("ann", "bob", "carl")) as found:
            ann, bob = found.guests["ann"], found.guests["bob"]
            part = bob.part
            await kick(found, "bob")
            goodbye = await bob.hears(Goodbye)
            assert (goodbye.again, "it was rude" in goodbye.reason) == (False, True)
            await bob.ended()
            assert bob.told.count(goodbye) == sum(isinstance(told, Goodbye) for told in bob.told) == 1
            await ann.hears(Desired, lambda told: told.part is None and "bob was kicked" in told.reason)
            await refused_everywhere(found, bob.identity, part.cluster)
            async with Client(found.address, member_context(bob.identity)) as client:
                for method, path in [("GET", f"/v1/blobs/{part.file.digest}"), ("GET", "/v1/status")]:
                    with pytest.raises(Refused, match="sent away for good: it was rude"):
                        await client.ask(method, path)
            with pytest.raises(Refused, match="sent away for good"):
                await enrol_again(found, bob.identity)
            await found.says("bob was sent away for good: it was rude")
            await found.says(f"cluster {part.cluster} is lost", "bob was kicked")
            await found.trains()
            assert found.cluster_of("ann").plan.members == ("ann", "carl")

    run(test())


def test_a_kicked_node_that_talks_on_is_not_heard(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path, ("ann", "bob", "carl")) as found:
            bob = found.guests["bob"]
            for _ in range(3):
                await bob.say(Report(bob.part.generation, Failed("a last word")))  # it is on its way ...
            found.coordinator.kick("bob", "it was rude")  # ... when this happens
            await bob.ended()
            assert [told.again for told in bob.told if isinstance(told, Goodbye)] == [False]
            assert not any("a last word" in said for said in found.words)

    run(test())


def test_two_nodes_with_one_name_are_two(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path) as found:
            first = await enrolled(found.ticket, "pc", tmp_path / "here")
            second = await enrolled(found.ticket, "pc", tmp_path / "there")
            assert (first.name, second.name) == ("pc", "pc-2")
            async with Guest(first, found.address), Guest(second, found.address):
                await found.trains()
                assert found.cluster_of("pc").plan.members == ("pc", "pc-2")
            await found.says("pc-2 enrolled with key")

    run(test())


def test_of_one_certificate_used_twice_the_newer_counts(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            ann = found.guests["ann"]
            newer = Guest(ann.identity, found.address)
            newer.holding = ann.holding  # it says that it has the stage
            async with newer:
                goodbye = await ann.hears(Goodbye)
                assert not goodbye.again
                await found.says("ann came again from 127.0.0.1", "is closed")
                part = (await newer.hears(Desired)).part
                assert part is not None
                with pytest.raises(CLOSED):  # the line of batches is taken, and stays with whom it was
                    await newer.dial_feed(part)
                await found.says("refused ann at 127.0.0.1", "while its cluster is being fed")
                await found.trains()

    run(test())


def test_a_certificate_that_comes_back_without_its_stage_gets_a_new_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path) as found, await found.guest("ann") as ann, await found.guest("bob"):
            await found.trains()
            async with Guest(ann.identity, found.address):
                assert not (await ann.hears(Goodbye)).again
                await found.says("is lost: ann came back without its stage")
                await found.trains()

    run(test())


@pytest.mark.parametrize("days", [-1, 1])
def test_clocks_that_differ_by_a_day_do_not_matter(tmp_path: Path, days: int) -> None:
    async def test() -> None:
        async with at_work(tmp_path, clock=lambda: time.time() + days * DAY_S) as found:
            hour = found.service.new_ticket(3600.0, None)
            expires_s = found.coordinator.state.tokens[Ticket.parse(hour).token].expires_s
            assert abs(expires_s - time.time() - 3600.0 - days * DAY_S) < 60.0, "by the coordinator's clock"
            async with Guest(await enrolled(hour, "carl", tmp_path / "nodes"), found.address) as carl:
                await carl.hears(Welcome)
            short = found.service.new_ticket(0.05, None)
            until_s = found.coordinator.now_s() + 0.05
            await found.until(lambda: found.coordinator.now_s() >= until_s, "the ticket has expired")
            with pytest.raises(Refused, match="has expired"):
                await enrolled(short, "mallory", tmp_path / "nodes")

    run(test())


def test_a_certificate_from_further_in_the_future_is_not_believed(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path, clock=lambda: time.time() + 3 * DAY_S) as found:
            with pytest.raises(LinkError):
                await found.enrol("ann")

    run(test())


def test_the_status_says_what_happened_and_tells_no_token(tmp_path: Path) -> None:
    async def test() -> None:
        async with at_work(tmp_path) as found:
            with pytest.raises(Refused):
                await enrolled(token_ticket(found, new_token()), "mallory", tmp_path / "nodes")
            await found.says("refused", "not known here")
            token = Ticket.parse(found.ticket).token
            async with Client(found.address, blind_context()) as client:
                answer = await client.ask("GET", "/v1/status", headers={"Authorization": f"Bearer {token}"})
            status = msgspec.json.decode(answer)
            assert any("not known here" in event["text"] for event in status["events"])
            assert status["refused"] == 1
            assert status["refusals"][0]["address"] == "127.0.0.1"
            assert token.encode() not in answer

    run(test())
