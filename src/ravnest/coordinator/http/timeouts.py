"""Timeouts of the coordinator's server."""

from __future__ import annotations

from dataclasses import fields
from math import inf

from ravnest.core.config import config, require

__all__ = ["HttpTimeouts"]


@config
class HttpTimeouts:
    """In seconds. `body_s` applies to each chunk of a body, not to the whole."""

    request_s: float = 20.0  # first request after the handshake
    hello_s: float = 15.0  # first message of a node's session or feed
    body_s: float = 30.0
    send_s: float = 20.0  # one message to a node
    goodbye_s: float = 2.0
    rejection_log_s: float = 5.0  # between two events of rejected connections

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            require(0 < value < inf, f"{each.name} must be > 0, got {value}")
