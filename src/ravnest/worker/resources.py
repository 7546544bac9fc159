"""Resources of a worker, whatever its stage: its name, its ways to peers, and the owner's limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ravnest.averaging.shared_memory import SharedBuffer
from ravnest.core.clock import Deadline
from ravnest.core.rate_limit import RateLimiter
from ravnest.errors import LinkError, LinkTimeout
from ravnest.protocol.peer import Peer, PeerAddresses
from ravnest.transport.link import LinkConfig
from ravnest.transport.stream import StreamLink
from ravnest.worker.local_peers import LocalPeers, PeerConnection
from ravnest.worker.replica_store import ReplicaStore

__all__ = ["WorkerResources"]

if TYPE_CHECKING:  # a local run needs no certificates, whose library takes 10 MB
    from ravnest.worker.remote_peers import RemotePeers

_LOCAL_S = 15.0  # after that a peer on the same host is reached over TLS, as any other


@dataclass(frozen=True)
class WorkerResources:
    """`expect(purpose, names)` admits these nodes for a purpose; no names: none any more.

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

    @property
    def addresses(self) -> PeerAddresses:
        return PeerAddresses(host=self.host) if self.remote is None else self.remote.addresses

    def connect_peer(
        self, peer: Peer, purpose: str, config: LinkConfig, *, deadline_s: float, buffer: SharedBuffer | None = None
    ) -> PeerConnection:
        """Return a link to a peer, which must call this node too; a ring neighbour on this host can read `buffer`."""
        deadline = Deadline(deadline_s)
        if self.local is not None and peer.where.host and peer.where.host == self.host:
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
