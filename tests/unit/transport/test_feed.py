"""The feed: a link of the first stage to its coordinator, for its own cluster only."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from ravnest.core.clock import Deadline
from ravnest.errors import HandshakeError, LinkError, LinkTimeout
from ravnest.protocol.pipeline import Data, Norm, feed_purpose
from ravnest.protocol.relay import FEED_PROTOCOL
from ravnest.transport.address import Address
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import Introduction
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.dialer import receive_introduction, send_introduction
from ravnest.transport.socket import Handshake, run_blocking
from ravnest.transport.stream import StreamLink
from ravnest.transport.tls import TlsChannel, authenticate, tls_context
from ravnest.worker.remote_peers import dial_feed
from tests.unit.transport.kinds import DEADLINE_S, Members

LINK = LinkConfig(headers=Data, generation=3)


class Coordinator:
    """Answers one feed with an introduction, then echoes a frame."""

    def __init__(self, identity: Identity, answer: Introduction | None = None, *, rejects: bool = False) -> None:
        self._context = tls_context(identity, server_side=True)
        self._context.set_alpn_protocols([FEED_PROTOCOL])
        self._answer, self._rejects = answer, rejects
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._sock.getsockname()[:2]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(DEADLINE_S)

    def _serve(self) -> None:
        with contextlib.suppress(LinkError, OSError):
            sock, _ = self._sock.accept()
            with run_blocking(self._handshake(sock), sock, Deadline(DEADLINE_S)) as link:
                header = link.receive(lambda header, lengths: [], deadline_s=DEADLINE_S)
                link.send(header, deadline_s=DEADLINE_S)

    def _handshake(self, sock: socket.socket) -> Handshake[StreamLink]:
        channel = TlsChannel(sock, self._context, server_side=True)
        name = yield from authenticate(channel)
        received = yield from receive_introduction(channel)
        if self._rejects:
            raise HandshakeError("rejected")
        yield from send_introduction(channel, self._answer or received)
        return StreamLink(channel, LINK, peer=name)


def dial(coordinator: Coordinator, identity: Identity) -> StreamLink:
    return dial_feed(coordinator.address, identity, LINK, purpose=feed_purpose("c1"), deadline_s=DEADLINE_S)


@pytest.fixture
def node(members: Members) -> Identity:
    return members["node"]


def test_frames_go_in_both_directions(members: Members, node: Identity) -> None:
    with Coordinator(members["coordinator"]) as coordinator, dial(coordinator, node) as link:
        assert link.peer == "coordinator"
        link.send(Norm(1, 2.0), deadline_s=DEADLINE_S)
        assert link.receive(lambda header, lengths: [], deadline_s=DEADLINE_S) == Norm(1, 2.0)


def test_another_member_is_rejected_as_coordinator(members: Members, node: Identity) -> None:
    with Coordinator(members["mallory"]) as coordinator, pytest.raises(HandshakeError, match="got mallory"):
        dial(coordinator, node)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Introduction.of(4, feed_purpose("c1")), "generation 4"),
        (Introduction.of(3, feed_purpose("c2")), "another purpose"),
    ],
)
def test_the_feed_of_another_plan_or_cluster_is_rejected(
    members: Members, node: Identity, answer: Introduction, message: str
) -> None:
    with Coordinator(members["coordinator"], answer) as coordinator, pytest.raises(HandshakeError, match=message):
        dial(coordinator, node)


def test_a_rejected_feed_is_closed(members: Members, node: Identity) -> None:
    with Coordinator(members["coordinator"], rejects=True) as coordinator, pytest.raises(LinkError):
        dial(coordinator, node)


def test_a_silent_coordinator_times_out(members: Members, node: Identity) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LinkTimeout):
        dial_feed(silent.getsockname()[:2], node, LINK, purpose="feed c1", deadline_s=0.2)
