"""The feed: the link from the first stage of a cluster to the coordinator, which is the stage before the first.

It is TLS to the coordinator's one port (ALPN `ravnest-feed`). Each side introduces itself with the generation and
"feed " + the cluster's name, the dialling side first; then there are frames both ways. A coordinator that does not
want the feed closes the connection.
"""

from __future__ import annotations

from ravnest.core.errors import HandshakeError
from ravnest.net.addresses import Address, show
from ravnest.net.agree import Introduction, check_same, hear_introduction, introduce
from ravnest.net.converse import authenticate
from ravnest.net.deadline import Deadline
from ravnest.net.handshake import TlsChannel
from ravnest.net.hello import FEED_PROTOCOL
from ravnest.net.identity import Identity
from ravnest.net.link import LinkConfig
from ravnest.net.listen import Greeting, finish
from ravnest.net.stream import StreamLink
from ravnest.net.tls import connect_tcp, tls_context, tune

__all__ = ["dial_feed", "feed_purpose"]

_COORDINATOR = "coordinator"


def feed_purpose(cluster: str) -> str:
    """What both sides of a cluster's feed introduce themselves with."""
    return f"feed {cluster}"


def dial_feed(
    address: Address, identity: Identity, config: LinkConfig, *, purpose: str, deadline_s: float
) -> StreamLink:
    """A link to the coordinator at `address`, all within `deadline_s`."""
    deadline = Deadline(deadline_s)
    context = tls_context(identity, server_side=False)
    context.set_alpn_protocols([FEED_PROTOCOL])
    mine = Introduction.of(config.generation, purpose)
    sock = connect_tcp(address, deadline)

    def greet() -> Greeting:
        tune(sock)
        channel = TlsChannel(sock, context, server_side=False)
        name = yield from authenticate(channel)
        if name != _COORDINATOR:
            raise HandshakeError(f"at {show(address)} is {name}, not the coordinator")
        yield from introduce(channel, mine)
        check_same(mine, (yield from hear_introduction(channel)), name)
        return StreamLink(channel, config, peer=name)

    try:
        return finish(greet(), sock, deadline)
    except OSError as error:
        raise HandshakeError(f"the connection to the coordinator broke during the handshake: {error}") from error
