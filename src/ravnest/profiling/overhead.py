"""Processor time of a stage besides the operations of its program, measured on this machine in half a second.

    seconds of a microbatch = operations
                            + parameter bytes * ((A - 1) / A * add + update / A)      A microbatches per update
                            + message bytes * move                                    in and out, both ways
                            + 24 * message                                            whatever its size

`add` is adding to an existing gradient, `update` the optimizer step with its weight versions and correction, `move` the
cost of a socket to another process of this machine at each end, `message` that of a small message between threads of
two processes, at each end. The last term is the work of the loop, the tape, its four messages and its reports, which
outweighs the operations of a tiny model; the requester's process takes 20 * message for each microbatch it feeds. Both
factors are ratios of processor times in local runs of a perceptron with two layers.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ravnest.graph import Program
from ravnest.graph.program import DTYPES
from ravnest.pipeline.compact_versions import CompactVersions
from ravnest.pipeline.optimizers import Optimizer, Stepper
from ravnest.pipeline.packed_stepper import PackedStepper
from ravnest.pipeline.staleness import Correction, Corrector
from ravnest.pipeline.state import StageState
from ravnest.pipeline.versions import Versions
from ravnest.planner import Chain
from ravnest.protocol.pipeline import Data, Norm
from ravnest.transport.link import Link, LinkConfig
from ravnest.transport.local import unix_pair
from ravnest.transport.pump import Pump, PumpConfig

__all__ = ["StageOverhead", "measure_overhead", "with_overhead"]

_SAMPLE_BYTES = 32_000_000  # more than caches hold, with gradients, optimizer state and versions
_MESSAGE_BYTES = 2**20
_NUM_MESSAGES = 16
_REPEATS = 5
_ROUND_TRIPS = 100
_MESSAGES_PER_MICROBATCH = 24
_REQUESTER_MESSAGES = 20


@dataclass(frozen=True)
class StageOverhead:
    """Seconds per byte: of parameters (`add_s`, `update_s`), of messages (`move_s`); and per small message."""

    add_s: float
    update_s: float
    move_s: float
    message_s: float = 0.0

    @property
    def microbatch_s(self) -> float:
        """Seconds of a stage per microbatch, whatever its size."""
        return _MESSAGES_PER_MICROBATCH * self.message_s

    @property
    def requester_s(self) -> float:
        """Seconds of the requester's process per microbatch."""
        return _REQUESTER_MESSAGES * self.message_s

    def parameters_s(self, num_bytes: int, accumulate: int) -> float:
        """Seconds per microbatch that parameters take besides their operations."""
        return num_bytes * ((accumulate - 1) * self.add_s + self.update_s) / accumulate


def with_overhead(chain: Chain, overhead: StageOverhead, accumulate: int) -> Chain:
    """Return the chain with the overhead of parameters added to the first op that reads them."""
    backward_s = list(chain.backward_s)
    for storage in chain.weights:
        if storage.ops:
            backward_s[min(storage.ops)] += overhead.parameters_s(storage.num_bytes, accumulate)
    return replace(chain, backward_s=tuple(backward_s))


def measure_overhead(
    program: Program, optimizer: Optimizer, correction: Correction, *, delay: int, memory: str = "exact"
) -> StageOverhead:
    """Measure the overhead with the program's parameter shapes and the current number of torch threads."""
    shapes = _sample(program)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        weights = {f"weight.{i}": torch.rand(shape) for i, shape in enumerate(shapes)}
        gradients = {name: torch.rand_like(t) for name, t in weights.items()}
        num_bytes = max(1, sum(t.nbytes for t in weights.values()))
        add_s = _median(lambda: _add(gradients, weights)) / num_bytes
        update_s = _update_s(weights, gradients, optimizer, Corrector(correction, delay), memory) / num_bytes
    return StageOverhead(add_s, update_s, _move_s(), _message_s())


def _sample(program: Program) -> list[tuple[int, ...]]:
    """Return shapes of the program's parameters, up to the size of the sample."""
    shapes, num_bytes = list[tuple[int, ...]](), 0
    for state in program.state:
        if state.trainable and DTYPES[state.dtype].is_floating_point and num_bytes < _SAMPLE_BYTES:
            shapes.append(state.shape)
            num_bytes += state.num_bytes
    return shapes


def _add(gradients: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        gradient.add_(more[name])


def _update_s(
    weights: dict[str, Tensor], gradients: dict[str, Tensor], optimizer: Optimizer, corrector: Corrector, memory: str
) -> float:
    if memory == "compact" and corrector.delay:
        versions = CompactVersions(weights, corrector, StageState(0))
        advance = partial(versions.advance, PackedStepper(optimizer, weights))
    elif memory == "small":
        advance = partial(Versions(weights, corrector).advance, PackedStepper(optimizer, weights))
    else:
        stepper = Stepper(optimizer, weights, fused=corrector.delay > 0)
        advance = partial(Versions(weights, corrector).advance, stepper)

    def update() -> None:
        advance(gradients, 0, lr_factor=1.0, norm=1.0)

    update()  # allocates the memory that later updates reuse
    return _median(update)


def _median(action: Callable[[], None]) -> float:
    """Return the median: other processes of this machine may interrupt some of the repetitions for long."""
    marks = [time.perf_counter()]
    for _ in range(_REPEATS):
        action()
        marks.append(time.perf_counter())
    return statistics.median(end - began for began, end in pairwise(marks))


def _move_s() -> float:
    """Return the processor time of one end, per byte."""
    left, right = unix_pair(LinkConfig(headers=Data))
    buffers = [memoryview(bytearray(_MESSAGE_BYTES)) for _ in range(2)]
    receiver = threading.Thread(target=_receive, args=(right, buffers[1]))
    began = time.process_time()
    receiver.start()
    for _ in range(_NUM_MESSAGES):
        left.send(Norm(0, 0.0), buffers[:1], deadline_s=60.0)
    receiver.join()
    used_s = time.process_time() - began
    left.close()
    right.close()
    return used_s / 2 / (_NUM_MESSAGES * _MESSAGE_BYTES)


def _message_s() -> float:
    """Return the processor time of a small message at one end, with the threads that send and receive."""
    ends, inboxes = unix_pair(LinkConfig(headers=Data)), [queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()]
    pumps = [_pump(link, inbox) for link, inbox in zip(ends, inboxes, strict=True)]

    def answer() -> None:
        for _ in range(_ROUND_TRIPS):
            inboxes[1].get(timeout=60.0)
            pumps[1].put(Norm(0, 0.0), (), deadline_s=60.0)

    answering = threading.Thread(target=answer)
    for pump in pumps:
        pump.start()
    began = time.process_time()
    answering.start()
    for _ in range(_ROUND_TRIPS):
        pumps[0].put(Norm(0, 0.0), (), deadline_s=60.0)
        inboxes[0].get(timeout=60.0)
    answering.join()
    used_s = time.process_time() - began
    for pump in pumps:
        pump.close(flush_s=0.0)
    return used_s / (4 * _ROUND_TRIPS)


def _pump(link: Link, inbox: queue.SimpleQueue[Any]) -> Pump:
    return Pump(link, lambda header, lengths: [], lambda header, views: inbox.put(header), inbox.put, PumpConfig())


def _receive(link: Link, buffer: memoryview) -> None:
    for _ in range(_NUM_MESSAGES):
        link.receive(lambda header, lengths: [buffer], deadline_s=60.0)
