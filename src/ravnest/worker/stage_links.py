"""Links of a stage to its neighbours, as the training loop uses them: queues to send, one inbox to receive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

from ravnest.core.rate_limit import RateLimiter
from ravnest.errors import FrameError, LinkClosed
from ravnest.graph import StateSpec
from ravnest.graph.program import DTYPES
from ravnest.pipeline.loop import Inbox
from ravnest.pipeline.tensor_codec import TensorCodec, as_bytes
from ravnest.protocol.pipeline import Backward, Data, Evaluate, Forward, Lend, Norm, Return
from ravnest.transport.link import Link
from ravnest.transport.pump import Pump, PumpConfig

__all__ = ["FeedLink", "StageLink", "NullLink"]


class StageLink:
    """A link to one neighbour, with a thread to send and one to receive into tensors of `TensorCodec`."""

    def __init__(
        self,
        link: Link,
        inbox: Inbox,
        codecs: dict[type, TensorCodec],
        tied: Sequence[StateSpec],
        on_error: Callable[[Exception], None],
        timeout_s: float,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        self._inbox, self._codecs, self._timeout_s = inbox, codecs, timeout_s
        self._tied = {s.target: s for s in tied}
        self._tensors: list[Tensor] = []
        self._link = link
        config = PumpConfig(capacity=16, frame_s=timeout_s, rate_limiter=rate_limiter)
        self._pump = Pump(link, self._place, self._received, on_error, config)

    def start(self) -> None:
        self._pump.start()

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        """Queue a message; blocks while the queue is full."""
        self._pump.put(header, [as_bytes(t) for t in tensors], deadline_s=self._timeout_s)

    def close(self, flush_s: float) -> None:
        self._pump.close(flush_s=flush_s)

    def drain(self, timeout_s: float) -> bool:
        """Wait until the queue is empty; false on timeout."""
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
        """Allocate tensors for a message, if this neighbour may send one of its kind and size."""
        match header:
            case Forward() | Evaluate() if Forward in self._codecs:
                return self._codecs[Forward].allocate(header.batch, lengths)
            case Backward() if Backward in self._codecs:
                return self._codecs[Backward].allocate(header.batch, lengths)
            case Lend(names=names) | Return(names=names):
                return self._allocate_tied(names, lengths)
            case Norm() if not lengths:
                return []
        raise FrameError(f"unexpected {type(header).__name__} with {len(lengths)} buffers from this neighbour")

    def _allocate_tied(self, names: tuple[str, ...], lengths: tuple[int, ...]) -> list[Tensor]:
        known = [self._tied[name] for name in names if name in self._tied]
        expected = [prod(s.shape) * DTYPES[s.dtype].itemsize for s in known]
        if len(known) != len(names) or expected != list(lengths):
            raise FrameError(
                f"tied parameters {names!r:.100} of {lengths!r:.100} bytes, expected {expected!r:.100} bytes"
            )
        return [torch.empty(s.shape, dtype=DTYPES[s.dtype]) for s in known]

    def _received(self, header: msgspec.Struct, views: Sequence[memoryview]) -> None:
        tensors, self._tensors = self._tensors, []
        self._inbox.put(header, tensors)  # type: ignore[arg-type]


class FeedLink(StageLink):
    """A link from the coordinator to the first stage.

    The coordinator may be gone while there are microbatches left to train. Their acknowledgements are then dropped; the
    replica that the stage leaves records what was trained.
    """

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        with contextlib.suppress(LinkClosed):
            super().put(header, tensors)


class NullLink:
    """Stands for the missing neighbour after the last stage."""

    depth = sent_bytes = received_bytes = 0

    def start(self) -> None:
        pass

    def drain(self, timeout_s: float) -> bool:
        return True

    def put(self, header: Data, tensors: Sequence[Tensor]) -> None:
        raise AssertionError(f"the last stage cannot send a {type(header).__name__} onwards")

    def close(self, flush_s: float) -> None:
        pass
