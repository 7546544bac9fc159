"""Connections of a worker to peers on the same host: unix sockets, and shared memory where rings run over them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ravnest.averaging.shared_memory import SharedBuffer, is_available, shared_link
from ravnest.transport.introduction import Introduction
from ravnest.transport.link import LinkConfig
from ravnest.transport.local import LocalEndpoint, dial_local_feed
from ravnest.transport.stream import StreamLink
from ravnest.transport.unix import unix_link

__all__ = ["RING", "LocalPeers", "PeerConnection"]

RING = "ring"  # the purpose of a link that carries averages


class PeerConnection(NamedTuple):
    """A link to a peer, how it was made, and what would make it better (nothing when it is direct)."""

    link: StreamLink
    how: str
    reason: str
    hint: str


class LocalPeers:
    """The nodes of this user on this host, each with a socket in `directory`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._endpoint = LocalEndpoint(directory, name)

    def close(self) -> None:
        self._endpoint.close()

    def connect(
        self, peer: str, purpose: str, config: LinkConfig, *, deadline_s: float, buffer: SharedBuffer | None = None
    ) -> PeerConnection:
        """Return a link to a node of this host; over a ring's link it can read `buffer` in place."""
        sock = self._endpoint.connect(peer, Introduction.of(config.generation, purpose), deadline_s=deadline_s)
        if purpose == RING and is_available():
            link = shared_link(sock, config, peer=peer, buffer=buffer)
            return PeerConnection(link, "memory", "same host: shared memory", "")
        return PeerConnection(unix_link(sock, config, peer=peer), "unix", "same host: unix socket", "")

    def connect_feed(self, purpose: str, config: LinkConfig, *, deadline_s: float) -> StreamLink:
        """Return the link to the coordinator of a local run."""
        return dial_local_feed(self._directory, self._name, config, purpose=purpose, deadline_s=deadline_s)
