"""Tokens, fingerprints, certificates, names and clocks: invalid ones are rejected, and training continues."""

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

from ravnest.coordinator.certificates import requester_identity
from ravnest.errors import LinkError, RequestRejected
from ravnest.node.client import Client, member_context, pinned_context, unverified_context
from ravnest.node.membership import UntrustedCoordinator
from ravnest.protocol.commands import StageFailed
from ravnest.protocol.control import DesiredAssignment, Disconnect, StageReport, Welcome
from ravnest.protocol.relay import FEED_PROTOCOL, RELAY_PROTOCOL, ObserveAddress, encode_message
from ravnest.transport.address import Address
from ravnest.transport.identity import Identity, make_key, make_request, save_identity
from ravnest.transport.p2p.relay_client import relay_context
from ravnest.transport.ticket import Ticket, new_token
from tests.unit.coordinator.attacks import (
    RawConnection,
    RunningCoordinator,
    anonymous_context,
    coordinator_with_nodes,
    foreign_identity,
    run,
    running_coordinator,
)
from tests.unit.coordinator.clients import FakeNode, Feed, enrolled, feed_context

DAY_S = 86400.0
CLOSED = (OSError, EOFError, LinkError)


def token_ticket(server: RunningCoordinator, token: str) -> str:
    return str(Ticket(addresses=(server.address,), fingerprint=server.service.authority.fingerprint, token=token))


def test_wrong_expired_and_used_up_tokens_are_rejected(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            service, nodes = server.service, tmp_path / "nodes"
            with pytest.raises(RequestRejected, match="unknown token"):
                await enrolled(token_ticket(server, new_token()), "mallory", nodes)

            expired = service.new_ticket(0.05, None)
            until_s = server.coordinator.now_s() + 0.05
            await server.until(lambda: server.coordinator.now_s() >= until_s, "the ticket has expired")
            with pytest.raises(RequestRejected, match="has expired"):
                await enrolled(expired, "mallory", nodes)

            once = service.new_ticket(3600.0, 1)
            await enrolled(once, "carl", nodes)
            with pytest.raises(RequestRejected, match="used up"):
                await enrolled(once, "mallory", nodes)

            for reason in ("unknown token", "has expired", "used up"):
                await server.wait_for_log("rejected 127.0.0.1", reason)
            assert set(server.coordinator.state.members) == {"ann", "bob", "carl"}
            assert not (nodes / "mallory").exists()

    run(test())


@contextlib.asynccontextmanager
async def impostor(directory: Path, shows: bytes | None) -> AsyncIterator[tuple[Address, bytearray]]:
    """A server of another authority that presents its own certificate or `shows`, and the bytes it receives."""
    identity = foreign_identity(directory, "coordinator")
    received_bytes = bytearray()
    page = shows or identity.authority_path.read_bytes()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                received_bytes.extend(data)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate_path, identity.key_path)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname(), received_bytes


@pytest.mark.parametrize("shows_the_real_one", [False, True])
def test_an_impostor_never_receives_the_token(tmp_path: Path, shows_the_real_one: bool) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            real = Ticket.parse(server.ticket)
            shown = server.service.authority.authority_pem if shows_the_real_one else None
            async with impostor(tmp_path / "impostor", shown) as (address, received_bytes):
                ticket = Ticket(addresses=(address[:2],), fingerprint=real.fingerprint, token=real.token)
                sentence = "not the coordinator of this ticket" if shows_the_real_one else "token was not sent"
                with pytest.raises((UntrustedCoordinator, LinkError), match=sentence):
                    await enrolled(str(ticket), "carl", tmp_path / "nodes")
                assert b"/v1/authority" in received_bytes, "its identity was requested"
                assert b"enrol" not in received_bytes
                assert real.token.encode() not in received_bytes
            assert (await enrolled(server.ticket, "carl", tmp_path / "nodes")).name == "carl"

    run(test())


async def rejected_everywhere(server: RunningCoordinator, identity: Identity, cluster: str = "c1-0") -> None:
    """At the session, the feed and the relay."""
    with pytest.raises((LinkError, RequestRejected)):
        async with FakeNode(identity, server.address) as node:
            await node.receive(Welcome)
    with pytest.raises(CLOSED):
        await Feed.dial(server.address, feed_context(identity), 1, cluster)
    assert await observe(server, relay_context(identity)) == b""


async def observe(server: RunningCoordinator, context: ssl.SSLContext) -> bytes:
    """The relay's answer to an `ObserveAddress`."""
    async with RawConnection(server.address, context) as connection:
        await connection.send(encode_message(ObserveAddress()))
        with contextlib.suppress(*CLOSED):
            return await connection.reader.read(1000)
    return b""


def test_a_certificate_of_another_authority_is_rejected(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            await rejected_everywhere(
                server, foreign_identity(tmp_path / "stranger", trusts=server.service.authority.authority_pem)
            )
            await server.wait_for_log("rejected 127.0.0.1", "handshake failed", "CERTIFICATE_VERIFY_FAILED")
            assert await observe(server, relay_context(server.nodes_by_name["ann"].identity)) != b"", (
                "a member is answered"
            )

    run(test())


def test_a_certificate_of_an_unknown_member_is_rejected(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            people, key = server.service.authority, make_key()
            certificate = people.sign(make_request(key, "ghost"), "ghost")
            await rejected_everywhere(server, save_identity(tmp_path / "ghost", key, certificate, people.authority_pem))
            await server.wait_for_log("rejected", "ghost is not a member")
            await server.wait_for_log("rejected ghost at 127.0.0.1", "ghost is not the first stage of a cluster")

    run(test())


def test_without_a_certificate_requests_are_rejected_with_a_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            async with Client(server.address, unverified_context()) as client:
                for method, path in [("GET", "/v1/control"), ("GET", "/v1/blobs/0"), ("PUT", "/v1/weights/1/0")]:
                    with pytest.raises(RequestRejected, match="members only"):
                        await client.ask(method, path)
                for path in ("/v1/kick", "/v1/tickets"):
                    with pytest.raises(RequestRejected, match="only the requester"):
                        await client.ask("POST", path, json={"node": "ann"})
                token = Ticket.parse(server.ticket).token
                for path in ("/v1/status", "/v1/line", "/v1/address"):
                    with pytest.raises(RequestRejected, match="a ticket is needed"):
                        await client.ask("GET", path, headers={"Authorization": f"Basic {token}"})
            with pytest.raises(CLOSED):
                await Feed.dial(server.address, anonymous_context(FEED_PROTOCOL), 1, "c1-0")
            assert await observe(server, anonymous_context(RELAY_PROTOCOL)) == b""
            for reason in (
                "members only",
                "only the requester",
                "a ticket is needed",
                "no certificate of this coordinator",
            ):
                await server.wait_for_log("rejected", reason)

    run(test())


def test_a_member_is_not_the_requester(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            async with Client(server.address, member_context(server.nodes_by_name["bob"].identity)) as client:
                with pytest.raises(RequestRejected, match="only the requester"):
                    await client.ask("POST", "/v1/kick", json={"node": "ann"})
            for name in ("requester", "coordinator"):
                with pytest.raises(RequestRejected, match=f"the name '{name}' is reserved"):
                    await server.enroll(name)
            assert server.coordinator.state.members["ann"].kick_reason is None

    run(test())


async def kick(server: RunningCoordinator, name: str) -> None:
    requester = requester_identity(server.service.config.directory)
    async with Client(server.address, member_context(requester)) as client:
        await client.ask("POST", "/v1/kick", json={"node": name, "reason": "it was rude"})


async def enrol_again(server: RunningCoordinator, identity: Identity) -> None:
    """With the key it has."""
    key = serialization.load_pem_private_key(identity.key_path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    asked = {
        "token": Ticket.parse(server.ticket).token, "name": "another", "request": make_request(key, "a").decode(),
    }  # fmt: skip
    async with Client(server.address, pinned_context(server.service.authority.authority_pem)) as client:
        await client.ask("POST", "/v1/enrol", json=asked)


def test_a_kicked_node_stays_out_and_the_others_form_a_cluster(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path, ("ann", "bob", "carl")) as server:
            ann, bob = server.nodes_by_name["ann"], server.nodes_by_name["bob"]
            part = bob.assignment
            await kick(server, "bob")
            disconnect = await bob.receive(Disconnect)
            assert (disconnect.may_reconnect, "it was rude" in disconnect.reason) == (False, True)
            await bob.ended()
            assert (
                bob.received.count(disconnect) == sum(isinstance(message, Disconnect) for message in bob.received) == 1
            )
            await ann.receive(
                DesiredAssignment, lambda message: message.assignment is None and "bob was kicked" in message.reason
            )
            await rejected_everywhere(server, bob.identity, part.cluster)
            async with Client(server.address, member_context(bob.identity)) as client:
                for method, path in [("GET", f"/v1/blobs/{part.file.digest}"), ("GET", "/v1/status")]:
                    with pytest.raises(RequestRejected, match="removed by the requester: it was rude"):
                        await client.ask(method, path)
            with pytest.raises(RequestRejected, match="removed by the requester"):
                await enrol_again(server, bob.identity)
            await server.wait_for_log("bob was removed: it was rude")
            await server.wait_for_log(f"cluster {part.cluster} failed", "bob was kicked")
            await server.train()
            assert server.cluster_of("ann").plan.members == ("ann", "carl")

    run(test())


def test_messages_of_a_kicked_node_are_ignored(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path, ("ann", "bob", "carl")) as server:
            bob = server.nodes_by_name["bob"]
            for _ in range(3):
                await bob.send(StageReport(bob.assignment.generation, StageFailed("a last word")))  # in transit ...
            server.coordinator.kick("bob", "it was rude")  # ... when this happens
            await bob.ended()
            assert [message.may_reconnect for message in bob.received if isinstance(message, Disconnect)] == [False]
            assert not any("a last word" in text for text in server.log)

    run(test())


def test_two_nodes_that_want_one_name_get_two(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_coordinator(tmp_path) as server:
            first = await enrolled(server.ticket, "pc", tmp_path / "here")
            second = await enrolled(server.ticket, "pc", tmp_path / "there")
            assert (first.name, second.name) == ("pc", "pc-2")
            async with FakeNode(first, server.address), FakeNode(second, server.address):
                await server.train()
                assert server.cluster_of("pc").plan.members == ("pc", "pc-2")
            await server.wait_for_log("pc-2 enrolled with key")

    run(test())


def test_the_newer_of_two_connections_with_one_certificate_counts(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            ann = server.nodes_by_name["ann"]
            newer = FakeNode(ann.identity, server.address)
            newer.holding = ann.holding  # it claims to have the stage
            async with newer:
                disconnect = await ann.receive(Disconnect)
                assert not disconnect.may_reconnect
                await server.wait_for_log("ann reconnected from 127.0.0.1", "is closed")
                part = (await newer.receive(DesiredAssignment)).assignment
                assert part is not None
                with pytest.raises(CLOSED):  # the feed stays with the older connection
                    await newer.dial_feed(part)
                await server.wait_for_log("rejected ann at 127.0.0.1", "while its cluster is being fed")
                await server.train()

    run(test())


def test_a_node_that_reconnects_without_its_stage_gets_a_new_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_coordinator(tmp_path) as server, await server.node("ann") as ann, await server.node("bob"):
            await server.train()
            async with FakeNode(ann.identity, server.address):
                assert not (await ann.receive(Disconnect)).may_reconnect
                await server.wait_for_log("failed: ann reconnected without its stage")
                await server.train()

    run(test())


@pytest.mark.parametrize("days", [-1, 1])
def test_clocks_that_differ_by_a_day_do_not_matter(tmp_path: Path, days: int) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path, clock=lambda: time.time() + days * DAY_S) as server:
            hour = server.service.new_ticket(3600.0, None)
            expires_s = server.coordinator.state.tokens[Ticket.parse(hour).token].expires_s
            assert abs(expires_s - time.time() - 3600.0 - days * DAY_S) < 60.0, "by the coordinator's clock"
            async with FakeNode(await enrolled(hour, "carl", tmp_path / "nodes"), server.address) as carl:
                await carl.receive(Welcome)
            short = server.service.new_ticket(0.05, None)
            until_s = server.coordinator.now_s() + 0.05
            await server.until(lambda: server.coordinator.now_s() >= until_s, "the ticket has expired")
            with pytest.raises(RequestRejected, match="has expired"):
                await enrolled(short, "mallory", tmp_path / "nodes")

    run(test())


def test_a_certificate_from_further_in_the_future_is_rejected(tmp_path: Path) -> None:
    async def test() -> None:
        async with running_coordinator(tmp_path, clock=lambda: time.time() + 3 * DAY_S) as server:
            with pytest.raises(LinkError):
                await server.enroll("ann")

    run(test())


def test_the_status_has_events_and_no_token(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            with pytest.raises(RequestRejected):
                await enrolled(token_ticket(server, new_token()), "mallory", tmp_path / "nodes")
            await server.wait_for_log("rejected", "unknown token")
            token = Ticket.parse(server.ticket).token
            async with Client(server.address, unverified_context()) as client:
                answer = await client.ask("GET", "/v1/status", headers={"Authorization": f"Bearer {token}"})
            status = msgspec.json.decode(answer)
            assert any("unknown token" in event["text"] for event in status["events"])
            assert status["num_rejected"] == 1
            assert status["rejections"][0]["address"] == "127.0.0.1"
            assert token.encode() not in answer

    run(test())
