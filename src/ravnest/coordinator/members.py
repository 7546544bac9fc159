"""A door in front of a protocol: only members come in; whoever else tries is sent away before a byte is heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias, cast

from ..net.front import ProtocolFactory
from .people import address_of, name_of
from .through import Through

__all__ = ["WhyNot", "members_only"]

WhyNot: TypeAlias = Callable[[str], str | None]
"""Why the holder of a certificate in this name may not come in; None: they may."""


def members_only(serve: ProtocolFactory, why_not: WhyNot, on_refused: Callable[[str, str], None]) -> ProtocolFactory:
    """Makes what `serve` makes, for members."""
    return lambda: _Door(serve, why_not, on_refused)


class _Door(Through):
    def __init__(self, serve: ProtocolFactory, why_not: WhyNot, on_refused: Callable[[str, str], None]) -> None:
        self._serve, self._why_not, self._on_refused = serve, why_not, on_refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        name = name_of(transport)
        reason = "this is for members: join with a ticket" if name is None else self._why_not(name)
        if reason is None:
            self.inside = self._serve()
            super().connection_made(transport)
        else:
            self._on_refused(address_of(transport), reason)
            cast("asyncio.Transport", transport).abort()
