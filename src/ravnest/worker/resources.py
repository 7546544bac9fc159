"""Resources of a worker that all its stages share: connections to peers, the replica store, and the owner's limits.

Peers on the same host are connected by unix sockets, and by shared memory for rings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ravnest.averaging.shared_memory import SharedBuffer, is_available, shared_link
from ravnest.core.clock import Deadline
from ravnest.core.rate_limit import RateLimiter
from ravnest.errors import LinkError, LinkTimeout
from ravnest.graph.device import CPU
from ravnest.protocol.peer import Peer, PeerAddresses
from ravnest.transport.introduction import Introduction
from ravnest.transport.link import LinkConfig
from ravnest.transport.local import LocalEndpoint, dial_local_feed, unix_link
from ravnest.transport.stream import StreamLink
from ravnest.worker.replica_store import ReplicaStore

if TYPE_CHECKING:
    import torch

    # a local run needs no certificates, whose library takes 10 MB
    from ravnest.worker.remote_peers import RemotePeers

__all__ = ["WorkerResources", "RING", "LocalPeers", "PeerConnection"]

RING = "ring"  # the purpose of a link that carries averages


class PeerConnection(NamedTuple):
    """A link to a peer, the way it was made, the reason, and a hint that could improve it (empty if it is direct)."""

    link: StreamLink
    kind: str
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


_LOCAL_S = 15.0  # after that, a peer on the same host is connected over TLS, as any other


@dataclass
class WorkerResources:
    """Name, limits and connections of a worker. `expect(purpose, names)` sets the nodes admitted for a purpose.

    The limits `memory_bytes` and `threads` may change; all other fields stay.

    `remote` connects to members of a fleet anywhere, `local` to nodes on this host; a worker has at least one.
    """

    name: str
    memory_bytes: int
    threads: int
    expect: Callable[[str, Sequence[str]], None]
    replica_store: ReplicaStore
    host: str = ""
    local: LocalPeers | None = None
    remote: RemotePeers | None = None
    rate_limiter: RateLimiter | None = None
    processor_share: float = 1.0
    device: torch.device = CPU

    @property
    def addresses(self) -> PeerAddresses:
        return PeerAddresses(host=self.host) if self.remote is None else self.remote.addresses

    def connect_peer(
        self, peer: Peer, purpose: str, config: LinkConfig, *, deadline_s: float, buffer: SharedBuffer | None = None
    ) -> PeerConnection:
        """Return a link to a peer, which must connect too; a ring neighbour on this host can read `buffer` in place."""
        deadline = Deadline(deadline_s)
        if self.local is not None and peer.addresses.host and peer.addresses.host == self.host:
            within_s = deadline_s if self.remote is None else min(_LOCAL_S, deadline_s)
            try:
                return self.local.connect(peer.name, purpose, config, deadline_s=within_s, buffer=buffer)
            except LinkTimeout:
                if self.remote is None:
                    raise
        if self.remote is None:
            raise LinkError(f"{peer.name} is not on this host, and this node has no endpoint for other hosts")
        return self.remote.connect(peer, purpose, config, deadline_s=deadline.left_s())

    def connect_feed(self, purpose: str, config: LinkConfig, *, deadline_s: float) -> StreamLink:
        """Return the link to the coordinator that feeds the first stage."""
        if self.remote is not None:
            return self.remote.connect_feed(purpose, config, deadline_s=deadline_s)
        assert self.local is not None, "a worker without an identity belongs to a local run"
        return self.local.connect_feed(purpose, config, deadline_s=deadline_s)
