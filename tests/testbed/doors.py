"""What hosts with doors run: `python -m tests.testbed.doors hub|node ...`. They speak JSON, a line at a time.

A node says where it is. For each `Invitation` that it is then given it reaches the peer, gives it its letter, takes
the peer's, and says how it went. The hub is a coordinator's port with nothing but the relay behind it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ravnest.core.control import Whereabouts
from ravnest.net.door import Door
from ravnest.net.front import Front, front_context
from ravnest.net.hello import RELAY_PROTOCOL
from ravnest.net.hub import RelayHub
from ravnest.net.identity import Identity
from ravnest.net.link import LinkConfig
from ravnest.net.stream import StreamLink
from ravnest.net.tunnel import RelayInfo
from ravnest.net.ways import Here, PeerInfo
from tests.net.kinds import Note, receive

PORT = 7700
DEADLINE_S = 20.0
LETTER_BYTES = 400_000


class Invitation(msgspec.Struct, frozen=True):
    """Reach this peer, who is invited to reach you."""

    peer: str
    where: Whereabouts
    token: str


class Account(msgspec.Struct, frozen=True):
    """How a node got to its peer, and whether the peer's whole letter came."""

    how: str
    reason: str
    hint: str
    letter_came: bool


def marked(name: str) -> bytes:
    """What a letter says all over again, so that one packet of it is enough to know it."""
    return f"(the secret of {name})".encode()


def letter(name: str) -> bytes:
    return marked(name) * (LETTER_BYTES // len(marked(name)))


def token_of(one: str, other: str) -> str:
    return f"a token for {min(one, other)} and {max(one, other)}"


def say(what: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


def be_hub(identity: Identity, names: Sequence[str]) -> None:
    """Any two of these may meet here."""

    async def serve() -> None:
        hub = RelayHub()
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                hub.open(token_of(one, other), (one, other))
        front = Front(front_context(identity), {RELAY_PROTOCOL: hub}, hub)
        server = await asyncio.get_running_loop().create_server(front, "0.0.0.0", PORT)
        say("ready")
        await server.serve_forever()

    asyncio.run(serve())


def be_node(identity: Identity, hub: str) -> None:
    with Door(("0.0.0.0", 0), identity, allowed=lambda name: True) as door:
        seen = door.observe(RelayInfo(address=(hub, PORT), token="none"), deadline_s=DEADLINE_S)
        here = Whereabouts(addresses=(seen.local,), observed=seen.seen)
        say(here)
        for line in sys.stdin:
            say(visit(door, identity.name, here, msgspec.json.decode(line, type=Invitation), hub))
        seen.close()


def visit(door: Door, me: str, here: Whereabouts, invitation: Invitation, hub: str) -> Account:
    peer = PeerInfo(
        name=invitation.peer,
        addresses=invitation.where.addresses,
        observed=invitation.where.observed,
        relay=RelayInfo(address=(hub, PORT), token=invitation.token),
    )
    mine = Here(addresses=here.addresses, observed=here.observed)
    reached = door.reach(peer, LinkConfig(headers=Note), here=mine, deadline_s=DEADLINE_S)
    with reached.link as link:
        came = exchange(link, letter(me), begins=me < invitation.peer)
    return Account(reached.how, reached.reason, reached.hint, came == letter(invitation.peer))


def exchange(link: StreamLink, mine: bytes, *, begins: bool) -> bytes:
    """Letters both ways, and a word that the last one came: who sent it must not leave before."""
    if begins:
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
        be_hub(Identity.load(Path(folder)), others)
    else:
        be_node(Identity.load(Path(folder)), *others)
