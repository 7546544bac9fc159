"""Programs for hosts: `python -m tests.integration.testbed.endpoints hub|node ...`. They exchange JSON lines.

A node prints its addresses. For each `ConnectRequest` on stdin it connects to the peer, exchanges payloads with it, and
prints a `ConnectReport`. The hub is a coordinator's port with only the relay behind it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ravnest.coordinator.http.alpn_server import AlpnServer, server_context
from ravnest.protocol.peer import PeerAddresses
from ravnest.protocol.relay import RELAY_PROTOCOL
from ravnest.transport.identity import Identity
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.candidates import LocalCandidates, PeerCandidates
from ravnest.transport.p2p.endpoint import PeerEndpoint
from ravnest.transport.p2p.relay_client import RelayInfo
from ravnest.transport.p2p.relay_server import RelayServer
from ravnest.transport.stream import StreamLink
from tests.unit.transport.kinds import Note, receive

PORT = 7700
DEADLINE_S = 60.0
PAYLOAD_BYTES = 400_000


class ConnectRequest(msgspec.Struct, frozen=True):
    """Connect to this peer, which receives the same request for this node."""

    peer: str
    addresses: PeerAddresses
    token: str


class ConnectReport(msgspec.Struct, frozen=True):
    """Type of the connection, and whether the peer's whole payload arrived."""

    kind: str
    reason: str
    hint: str
    is_complete: bool


def marker(name: str) -> bytes:
    """Repeated in a payload, so that every packet of it is recognizable."""
    return f"(the secret of {name})".encode()


def payload(name: str) -> bytes:
    return marker(name) * (PAYLOAD_BYTES // len(marker(name)))


def token_of(one: str, other: str) -> str:
    return f"a token for {min(one, other)} and {max(one, other)}"


def print_json(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def run_hub(identity: Identity, names: Sequence[str]) -> None:
    """Relay between any two of these nodes."""

    async def serve() -> None:
        relay = RelayServer()
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                relay.open(token_of(one, other), (one, other))
        front = AlpnServer(server_context(identity), {RELAY_PROTOCOL: relay}, relay)
        server = await asyncio.get_running_loop().create_server(front, "0.0.0.0", PORT)
        print_json("ready")
        await server.serve_forever()

    asyncio.run(serve())


def run_node(identity: Identity, hub: str) -> None:
    with PeerEndpoint(("0.0.0.0", 0), identity, allowed=lambda name: True) as endpoint:
        observation = endpoint.observe(RelayInfo(address=(hub, PORT), token="none"), deadline_s=DEADLINE_S)
        local = PeerAddresses(addresses=(observation.local,), observed=observation.observed)
        print_json(local)
        for line in sys.stdin:
            request = msgspec.json.decode(line, type=ConnectRequest)
            print_json(connect(endpoint, identity.name, local, request, hub))
        observation.close()


def connect(endpoint: PeerEndpoint, me: str, local: PeerAddresses, request: ConnectRequest, hub: str) -> ConnectReport:
    peer = PeerCandidates(
        name=request.peer,
        addresses=request.addresses.addresses,
        observed=request.addresses.observed,
        relay=RelayInfo(address=(hub, PORT), token=request.token),
    )
    candidates = LocalCandidates(addresses=local.addresses, observed=local.observed)
    connected = endpoint.connect(peer, LinkConfig(headers=Note), local=candidates, deadline_s=DEADLINE_S)
    with connected.link as link:
        received = exchange(link, payload(me), is_first=me < request.peer)
    return ConnectReport(connected.kind, connected.reason, connected.hint, received == payload(request.peer))


def exchange(link: StreamLink, mine: bytes, *, is_first: bool) -> bytes:
    """Exchange payloads; the last one is acknowledged, so that its sender does not close too early."""
    if is_first:
        link.send(Note(1), [mine], deadline_s=DEADLINE_S)
        theirs = receive(link, DEADLINE_S)[1][0]
        link.send(Note(2), deadline_s=DEADLINE_S)
    else:
        theirs = receive(link, DEADLINE_S)[1][0]
        link.send(Note(1), [mine], deadline_s=DEADLINE_S)
        receive(link, DEADLINE_S)
    return theirs


if __name__ == "__main__":
    role, folder, *others = sys.argv[1:]
    if role == "hub":
        run_hub(Identity.load(Path(folder)), others)
    else:
        run_node(Identity.load(Path(folder)), *others)
