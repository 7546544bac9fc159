"""How long a guest may take for each thing. Whoever takes longer is sent away: nobody holds a place for ever."""

from __future__ import annotations

from dataclasses import fields
from math import inf

from ..core.config import config, require

__all__ = ["Patience"]


@config
class Patience:
    """Seconds from the moment that a thing is expected. A body may take longer as a whole, but not in any part."""

    request_s: float = 20.0  # for the first request, after the handshake
    hello_s: float = 15.0  # for a node's first words, in a conversation or on a feed
    body_s: float = 30.0
    send_s: float = 20.0  # for taking one message
    goodbye_s: float = 2.0
    tell_s: float = 5.0  # between two times that the log tells of those sent away

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            require(0 < value < inf, f"{each.name} must be above 0 seconds, not {value}")
