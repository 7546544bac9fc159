"""Links as the loop sees them: doors to put messages into, and an inbox that received ones land in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..core.errors import FrameError, LinkClosed
from ..core.messages import Backward, Data, Evaluate, Forward, Lend, Norm, Return
from ..graph import State
from ..graph.program import DTYPES
from ..net.link import Link
from ..net.pace import Pace
from ..net.pump import Pump, PumpConfig
from ..runtime.freight import Freight, as_bytes
from ..runtime.loop import Inbox

__all__ = ["Feed", "Port", "Wall"]


class Port:
    """One neighbour: a link with its two threads. Received tensors lie where `Freight` put them."""

    def __init__(
        self,
        link: Link,
        inbox: Inbox,
        freights: dict[type, Freight],
        tied: Sequence[State],
        on_error: Callable[[Exception], None],
        patience_s: float,
        pace: Pace | None = None,
    ) -> None:
        self._inbox, self._freights, self._patience_s = inbox, freights, patience_s
        self._tied = {s.target: s for s in tied}
        self._tensors: list[Tensor] = []
        self._link = link
        config = PumpConfig(capacity=16, frame_s=patience_s, pace=pace)
        self._pump = Pump(link, self._place, self._arrived, on_error, config)

    def start(self) -> None:
        self._pump.start()

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        """Queue a message; waits when the neighbour takes none."""
        self._pump.put(header, [as_bytes(t) for t in tensors], deadline_s=self._patience_s)

    def close(self, flush_s: float) -> None:
        self._pump.close(flush_s=flush_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued; whether that is so."""
        return self._pump.drain(deadline_s=timeout_s)

    @property
    def depth(self) -> int:
        return self._pump.depth

    @property
    def sent_bytes(self) -> int:
        return self._link.stats.sent.num_bytes

    @property
    def received_bytes(self) -> int:
        return self._link.stats.received.num_bytes

    def _place(self, header: msgspec.Struct, lengths: tuple[int, ...]) -> Sequence[memoryview]:
        self._tensors = self._allocate(header, lengths)
        return [as_bytes(t) for t in self._tensors]

    def _allocate(self, header: Any, lengths: tuple[int, ...]) -> list[Tensor]:
        """Memory for a message of a kind and size that this neighbour may send."""
        match header:
            case Forward() | Evaluate() if Forward in self._freights:
                return self._freights[Forward].allocate(header.batch, lengths)
            case Backward() if Backward in self._freights:
                return self._freights[Backward].allocate(header.batch, lengths)
            case Lend(names=names) | Return(names=names):
                return self._allocate_tied(names, lengths)
            case Norm() if not lengths:
                return []
        raise FrameError(f"a {type(header).__name__} with {len(lengths)} buffers does not come from this side")

    def _allocate_tied(self, names: tuple[str, ...], lengths: tuple[int, ...]) -> list[Tensor]:
        known = [self._tied[name] for name in names if name in self._tied]
        expected = [prod(s.shape) * DTYPES[s.dtype].itemsize for s in known]
        if len(known) != len(names) or expected != list(lengths):
            raise FrameError(f"tied parameters {names!r:.100} of {lengths!r:.100} bytes are not what was agreed")
        return [torch.empty(s.shape, dtype=DTYPES[s.dtype]) for s in known]

    def _arrived(self, header: msgspec.Struct, views: Sequence[memoryview]) -> None:
        tensors, self._tensors = self._tensors, []
        self._inbox.put(header, tensors)  # type: ignore[arg-type]


class Feed(Port):
    """The coordinator before the first stage. It may go away while there is something to train: what is done then is
    not told to it, and is known by the copy that the stage leaves."""

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        with contextlib.suppress(LinkClosed):
            super().put(header, tensors)


class Wall:
    """Where there is no neighbour: behind the last stage."""

    depth = sent_bytes = received_bytes = 0

    def start(self) -> None:
        pass

    def drain(self, timeout_s: float) -> bool:
        return True

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        raise AssertionError(f"nobody takes a {type(header).__name__} here")

    def close(self, flush_s: float) -> None:
        pass
