"""A peer in a process of its own, to be killed: `python -m tests.net.peer unix PATH | tls PORT DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path

from ravnest.net.identity import Identity
from ravnest.net.stream import StreamLink
from ravnest.net.tls import dial_tls
from ravnest.net.unix import connect_unix
from tests.net.kinds import CONFIG, DEADLINE_S, Note

LIFETIME_S = 60.0
BIG_BYTES = 80 * 2**20  # more than any link holds


def connect(words: list[str]) -> StreamLink:
    if words[0] == "unix":
        return connect_unix(Path(words[1]), CONFIG, deadline_s=DEADLINE_S)
    identity = Identity.load(Path(words[2]))
    return dial_tls(("127.0.0.1", int(words[1])), identity, CONFIG, allowed=lambda name: True, deadline_s=DEADLINE_S)


def main() -> None:
    """One small message, then one that cannot end unless it is read; nothing is ever received."""
    with connect(sys.argv[1:]) as link:
        link.send(Note(1), [b"alive"], deadline_s=LIFETIME_S)
        link.send(Note(2), [bytes(BIG_BYTES)], deadline_s=LIFETIME_S)


if __name__ == "__main__":
    main()
