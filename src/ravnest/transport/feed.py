"""The feed: the link from the first stage of a cluster to the coordinator, which supplies its batches.

TLS to the coordinator's port (ALPN `ravnest-feed`). Each side introduces itself with the generation and "feed " + the
cluster's name, the dialing side first; then frames go both ways. The coordinator rejects a feed by closing it.
"""

from __future__ import annotations

from ravnest.core.clock import Deadline
from ravnest.core.ids import COORDINATOR
from ravnest.errors import HandshakeError
from ravnest.protocol.relay import FEED_PROTOCOL
from ravnest.transport.address import Address, show
from ravnest.transport.identity import Identity
from ravnest.transport.introduction import Introduction, check_introduction
from ravnest.transport.link import LinkConfig
from ravnest.transport.p2p.negotiation import receive_introduction, send_introduction
from ravnest.transport.socket import Handshake, run_blocking
from ravnest.transport.stream import StreamLink
from ravnest.transport.tls import TlsChannel, authenticate, connect_tcp, tls_context, tune

__all__ = ["dial_feed"]


def dial_feed(
    address: Address, identity: Identity, config: LinkConfig, *, purpose: str, deadline_s: float
) -> StreamLink:
    """Open a link to the coordinator at `address` within `deadline_s`."""
    deadline = Deadline(deadline_s)
    context = tls_context(identity, server_side=False)
    context.set_alpn_protocols([FEED_PROTOCOL])
    mine = Introduction.of(config.generation, purpose)
    sock = connect_tcp(address, deadline)

    def handshake() -> Handshake[StreamLink]:
        tune(sock)
        channel = TlsChannel(sock, context, server_side=False)
        name = yield from authenticate(channel)
        if name != COORDINATOR:
            raise HandshakeError(f"expected the coordinator at {show(address)}, found {name}")
        yield from send_introduction(channel, mine)
        check_introduction(mine, (yield from receive_introduction(channel)), name)
        return StreamLink(channel, config, peer=name)

    return run_blocking(handshake(), sock, deadline)
