"""Copies between host memory and the device, at the edges of a stage.

Messages are host memory. A stage on an accelerator copies its inputs and the gradients that it receives to the device,
its outputs and the gradients that it sends to the host, and nothing else for a microbatch. Where the accelerator has
streams, copies run beside the computation, each direction in a stream of its own:

    upload      starts when a message has arrived; the computation waits for it where it uses the values
    download    starts when the results are computed; the sender waits for it

Host memory of copies is pinned where the accelerator can pin it. On the processor nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ravnest.graph.device import module_of

__all__ = ["Download", "Transfers", "Upload", "can_pin"]


class _Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class Upload:
    """Tensors on their way to the device."""

    _tensors: list[Tensor]
    _event: Any = None
    _transfers: Transfers | None = None

    def tensors(self) -> list[Tensor]:
        """Return the tensors, for computations of this thread."""
        if self._transfers is not None:
            self._transfers.use(self._tensors, self._event)
        return self._tensors

    def finish(self) -> None:
        """Wait until the host memory is no longer read."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True)
class Download:
    """Tensors on their way to the host; `sources` keeps the device's memory until they have arrived."""

    _tensors: list[Tensor]
    _event: _Event | None = None
    sources: tuple[Tensor, ...] = ()

    @property
    def is_pending(self) -> bool:
        return self._event is not None

    def tensors(self) -> list[Tensor]:
        """Return the tensors when they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class Transfers:
    """The copies of one stage, by the thread that computes it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pins = can_pin(device)
        self._module = None if device.type == "cpu" else module_of(device)
        self._up: Any = None
        self._down: Any = None
        if self._module is not None and all(hasattr(self._module, name) for name in ("Stream", "stream", "Event")):
            self._up, self._down = self._module.Stream(device=device), self._module.Stream(device=device)

    def upload(self, tensors: Sequence[Tensor]) -> Upload:
        """Start to copy host tensors to the device; they may not change until the copies have been used."""
        if self._module is None:
            return Upload(list(tensors))
        if self._up is None:
            return Upload([tensor.to(self.device) for tensor in tensors])
        with self._module.stream(self._up):
            copies = [torch.empty_like(tensor, device=self.device, pin_memory=False) for tensor in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        return Upload(copies, self._up.record_event(), self)

    def use(self, tensors: Sequence[Tensor], event: Any) -> None:
        """Let the computation wait for an upload, and let its memory be reused only after the computation."""
        computing = self._current()
        computing.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(computing)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Start to copy device tensors to the host, after all that has been computed so far."""
        if self._module is None or not tensors:
            return Download(list(tensors))
        sources = tuple(tensor.detach() for tensor in tensors)
        if self._down is None:
            return Download([source.cpu() for source in sources])
        self._down.wait_stream(self._current())
        with self._module.stream(self._down):
            copies = [torch.empty(s.shape, dtype=s.dtype, pin_memory=self.pins) for s in sources]
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
        return Download(copies, self._down.record_event(), sources)

    def before_change(self) -> None:
        """Let the computation wait for all downloads, before it changes what they may still read."""
        if self._down is not None:
            self._current().wait_stream(self._down)

    def _current(self) -> Any:
        assert self._module is not None
        return self._module.current_stream(self.device)


def can_pin(device: torch.device) -> bool:
    """Whether torch has pinned memory for copies to and from a device."""
    if device.type == "cpu":
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:
        return False
