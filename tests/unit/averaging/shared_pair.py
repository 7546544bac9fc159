"""Both ends of a link through shared memory in one process, for two threads."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from ravnest.averaging.shared_memory import SharedBuffer, SharedLink, shared_link
from ravnest.transport.link import LinkConfig

__all__ = ["shared_pair"]


def shared_pair(
    config: LinkConfig, buffers: tuple[SharedBuffer | None, SharedBuffer | None] = (None, None)
) -> tuple[SharedLink, SharedLink]:
    left, right = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(shared_link, right, config, peer="left", buffer=buffers[1])
        near = shared_link(left, config, peer="right", buffer=buffers[0])
        return near, other.result()
