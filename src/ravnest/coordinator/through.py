"""A protocol in front of another: what arrives is passed on, once there is somebody inside to pass it to."""

from __future__ import annotations

import asyncio

__all__ = ["Through"]


class Through(asyncio.Protocol):
    """Those who derive from it say who is `inside`, and when."""

    inside: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self.inside is not None:
            self.inside.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.inside is not None:
            self.inside.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inside.eof_received() if self.inside is not None else None

    def pause_writing(self) -> None:
        if self.inside is not None:
            self.inside.pause_writing()

    def resume_writing(self) -> None:
        if self.inside is not None:
            self.inside.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self.inside is not None:
            self.inside.connection_lost(error)
