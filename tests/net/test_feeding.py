"""A root's link to its coordinator: to nobody else, and for nothing else than its own feed."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from ravnest.core.errors import HandshakeError, LinkError, LinkTimeout
from ravnest.core.messages import Data, Norm
from ravnest.net.addresses import Address
from ravnest.net.agree import Introduction, hear_introduction, introduce
from ravnest.net.converse import Steps, authenticate
from ravnest.net.deadline import Deadline
from ravnest.net.feeding import dial_feed, feed_purpose
from ravnest.net.handshake import TlsChannel
from ravnest.net.hello import FEED_PROTOCOL
from ravnest.net.identity import Identity
from ravnest.net.link import LinkConfig
from ravnest.net.listen import finish
from ravnest.net.stream import StreamLink
from ravnest.net.tls import tls_context
from tests.net.kinds import DEADLINE_S, Members

LINK = LinkConfig(headers=Data, generation=3)


class Coordinator:
    """Answers one feed with an introduction, then says back each frame."""

    def __init__(self, identity: Identity, answer: Introduction | None = None, *, refuses: bool = False) -> None:
        self._context = tls_context(identity, server_side=True)
        self._context.set_alpn_protocols([FEED_PROTOCOL])
        self._answer, self._refuses = answer, refuses
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
            with finish(self._greet(sock), sock, Deadline(DEADLINE_S)) as link:
                header = link.receive(lambda header, lengths: [], deadline_s=DEADLINE_S)
                link.send(header, deadline_s=DEADLINE_S)

    def _greet(self, sock: socket.socket) -> Steps[StreamLink]:
        channel = TlsChannel(sock, self._context, server_side=True)
        name = yield from authenticate(channel)
        said = yield from hear_introduction(channel)
        if self._refuses:
            raise HandshakeError("not wanted")
        yield from introduce(channel, self._answer or said)
        return StreamLink(channel, LINK, peer=name)


def dial(coordinator: Coordinator, identity: Identity) -> StreamLink:
    return dial_feed(coordinator.address, identity, LINK, purpose=feed_purpose("c1"), deadline_s=DEADLINE_S)


@pytest.fixture
def root(members: Members) -> Identity:
    return members["root"]


def test_frames_go_both_ways(members: Members, root: Identity) -> None:
    with Coordinator(members["coordinator"]) as coordinator, dial(coordinator, root) as link:
        assert link.peer == "coordinator"
        link.send(Norm(1, 2.0), deadline_s=DEADLINE_S)
        assert link.receive(lambda header, lengths: [], deadline_s=DEADLINE_S) == Norm(1, 2.0)


def test_another_member_is_no_coordinator(members: Members, root: Identity) -> None:
    with Coordinator(members["mallory"]) as coordinator, pytest.raises(HandshakeError, match="mallory, not"):
        dial(coordinator, root)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Introduction.of(4, feed_purpose("c1")), "generation 4"),
        (Introduction.of(3, feed_purpose("c2")), "another purpose"),
    ],
)
def test_the_feed_of_another_plan_or_cluster_is_refused(
    members: Members, root: Identity, answer: Introduction, complaint: str
) -> None:
    with Coordinator(members["coordinator"], answer) as coordinator, pytest.raises(HandshakeError, match=complaint):
        dial(coordinator, root)


def test_a_coordinator_that_does_not_want_it_closes(members: Members, root: Identity) -> None:
    with Coordinator(members["coordinator"], refuses=True) as coordinator, pytest.raises(LinkError):
        dial(coordinator, root)


def test_a_silent_coordinator_is_given_up(members: Members, root: Identity) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LinkTimeout):
        dial_feed(silent.getsockname()[:2], root, LINK, purpose="feed c1", deadline_s=0.2)
