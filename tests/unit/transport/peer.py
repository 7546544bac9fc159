"""A peer in its own process, to be killed: `python -m tests.unit.transport.peer unix FD | tls PORT DIRECTORY`."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from ravnest.transport.identity import Identity
from ravnest.transport.local import unix_link
from ravnest.transport.stream import StreamLink
from tests.unit.transport.kinds import CONFIG, DEADLINE_S, Note
from tests.unit.transport.tls_links import dial_tls

LIFETIME_S = 60.0
BIG_BYTES = 80 * 2**20  # more than any link holds


def connect(args: list[str]) -> StreamLink:
    if args[0] == "unix":
        return unix_link(socket.socket(fileno=int(args[1])), CONFIG, peer="parent")
    return dial_tls(("127.0.0.1", int(args[1])), Identity.load(Path(args[2])), CONFIG, deadline_s=DEADLINE_S)


def main() -> None:
    """Send a small message, then one that cannot complete unless it is read; receive nothing."""
    with connect(sys.argv[1:]) as link:
        link.send(Note(1), [b"alive"], deadline_s=LIFETIME_S)
        link.send(Note(2), [bytes(BIG_BYTES)], deadline_s=LIFETIME_S)


if __name__ == "__main__":
    main()
