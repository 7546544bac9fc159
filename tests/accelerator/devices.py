"""A test accelerator: torch devices `testacc:0`, `testacc:1`, ... whose data are CPU memory.

It is a backend for torch's PrivateUse1 key. A device tensor is an ordinary tensor that shares the memory of a CPU
tensor (relabelled by DLPack); every operation runs on the CPU aliases of its arguments. As a real accelerator it

    refuses operations that mix devices, except for numbers (tensors without dimensions) of the CPU
    has random numbers of its own, which `torch.manual_seed` seeds
    copies without blocking: the target has garbage until the copy's stream is waited for, and the source may not change
    has streams: a copy in a side stream may not read what the main stream has computed unless it waits for it
    has a memory limit, at which it raises `torch.OutOfMemoryError`, and knows its peak
    casts the arguments of matrix products in autocast

and it counts copies between host and device, and synchronisations. Garbage is NaN, or the largest integer. There may
be several devices, but only the first can train: torch's autograd has one queue for backends written in Python.

This module has memory, streams and counts; `tests.accelerator.backend` has the operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = [
    "CPU_KIND",
    "EXTENSION_KIND",
    "NAME",
    "Counts",
    "PendingCopy",
    "TestAccelerator",
    "WatchedSource",
    "accelerator",
    "alias_of",
    "current_stream",
    "index_of",
    "is_ours",
    "relabelled",
]

NAME = "testacc"
CPU_KIND, EXTENSION_KIND = 1, 12  # DLPack's numbers of device types
_KIND_OFFSET, _INDEX_OFFSET = 8, 12  # in a DLTensor
_NO_LIMIT = 1 << 40
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@dataclass
class Counts:
    """Copies and synchronisations since the last `reset`."""

    to_device: int = 0
    to_host: int = 0
    synchronisations: int = 0
    to_host_shapes: list[tuple[int, ...]] = field(default_factory=list)
    to_device_shapes: list[tuple[int, ...]] = field(default_factory=list)


@dataclass
class _Memory:
    limit_bytes: int = _NO_LIMIT
    used_bytes: int = 0
    peak_bytes: int = 0


class PendingCopy:
    """A copy that is submitted and not yet visible: `finish` makes it so."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.source, self.target, self.values = source, target, source.clone()
        _fill_with_garbage(target)

    def finish(self) -> None:
        if not _same_bits(self.source, self.values):
            raise RuntimeError("the source of a copy changed before its stream was waited for")
        self.target.copy_(self.values)


class WatchedSource:
    """The host memory that a copy to the device reads: it may not change before the stream is waited for."""

    def __init__(self, source: Tensor) -> None:
        self.source, self.values = source, source.clone()

    def finish(self) -> None:
        if not _same_bits(self.source, self.values):
            raise RuntimeError("the source of a copy changed before its stream was waited for")


class CopyStream(torch.Stream):
    """A queue of copies; the stream with number 0 computes."""

    number: int
    pending: list[PendingCopy | WatchedSource]
    seen: int

    def __new__(cls, device: Any = None, priority: int = 0, *, number: int | None = None) -> CopyStream:
        index = index_of(device)
        number = accelerator.next_stream() if number is None else number
        stream = super().__new__(cls, stream_id=number, device_index=index, device_type=20)
        stream.number, stream.pending, stream.seen = number, [], 0
        return stream

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        accelerator.counts.synchronisations += 1
        self.finish()

    def finish(self) -> None:
        with accelerator.lock:
            pending, self.pending[:] = list(self.pending), []
        for copy in pending:
            copy.finish()

    def wait_stream(self, other: CopyStream) -> None:  # type: ignore[override]
        """Order this stream after the other one."""
        if self.number == 0:
            other.finish()
        else:
            self.seen = accelerator.num_computed

    def wait_event(self, event: StreamEvent) -> None:  # type: ignore[override]
        event.wait(self)

    def record_event(self, event: StreamEvent | None = None) -> StreamEvent:  # type: ignore[override]
        event = event or StreamEvent()
        event.record(self)
        return event


class StreamEvent:
    """A point in a stream."""

    def __init__(self, **options: Any) -> None:
        self._stream: CopyStream | None = None
        self._pending: list[PendingCopy | WatchedSource] = []
        self._seen = 0

    def record(self, stream: CopyStream | None = None) -> None:
        self._stream = stream or current_stream()
        self._pending, self._seen = list(self._stream.pending), accelerator.num_computed

    def wait(self, stream: CopyStream | None = None) -> None:
        stream = stream or current_stream()
        if stream.number == 0:
            self._finish()
        else:
            stream.seen = max(stream.seen, self._seen)

    def synchronize(self) -> None:
        accelerator.counts.synchronisations += 1
        self._finish()

    def query(self) -> bool:
        self._finish()
        return True

    def _finish(self) -> None:
        assert self._stream is not None, "the event was not recorded"
        for copy in self._pending:
            with accelerator.lock:
                if copy not in self._stream.pending:
                    continue
                self._stream.pending.remove(copy)
            copy.finish()


class TestAccelerator:
    __test__ = False  # not a test of pytest
    """The devices of this process; also the module `torch.testacc`."""

    Stream: ClassVar[type[CopyStream]] = CopyStream
    Event: ClassVar[type[StreamEvent]] = StreamEvent

    def __init__(self) -> None:
        self.is_present = True
        self.has_bf16 = True
        self.num_devices = 1
        self.num_computed = 0  # operations, of all devices
        self.lock = threading.RLock()
        self.counts = Counts()
        self._num_streams = 0
        self._computed_at: dict[int, int] = {}  # operation by address of the memory that it wrote
        self._memory: dict[int, _Memory] = defaultdict(_Memory)
        self._random: dict[int, Tensor] = {}
        self._streams = threading.local()
        self._main: dict[int, CopyStream] = {}

    def appear(self, num_devices: int) -> None:
        """Be present, without limits."""
        self.is_present, self.has_bf16, self.num_devices = True, True, num_devices
        for index in range(num_devices):
            self.limit(None, index)
        self.reset()

    def disappear(self) -> None:
        """As if the PC had no accelerator."""
        self.is_present = False
        self.finish()

    def reset(self) -> None:
        """Count from zero."""
        self.counts = Counts()
        self.reset_peak_memory_stats()

    def limit(self, num_bytes: int | None, index: int = 0) -> None:
        """Give a device this much memory, besides what is in use; None: without end."""
        memory = self._memory[index]
        memory.limit_bytes = _NO_LIMIT if num_bytes is None else memory.used_bytes + num_bytes

    # the interface of a device module, as `torch.cuda` has it

    def is_available(self) -> bool:
        return self.is_present and self.num_devices > 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self.num_devices if self.is_present else 0

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return f"Test Accelerator {index_of(device)}"

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return self.has_bf16

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        self.counts.synchronisations += 1
        self.finish()

    def finish(self) -> None:
        """Complete all copies."""
        for stream in [*self._main.values(), *getattr(self._streams, "side", ())]:
            stream.finish()

    def current_stream(self, device: Any = None) -> CopyStream:
        return current_stream(device)

    @contextlib.contextmanager
    def stream(self, stream: CopyStream) -> Iterator[None]:
        before = getattr(self._streams, "current", None)
        self._streams.current = stream
        try:
            yield
        finally:
            self._streams.current = before

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = self._memory[index_of(device)]
        return memory.limit_bytes - memory.used_bytes, memory.limit_bytes

    def memory_allocated(self, device: Any = None) -> int:
        return self._memory[index_of(device)].used_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._memory[index_of(device)].peak_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        for memory in self._memory.values():
            memory.peak_bytes = memory.used_bytes

    def empty_cache(self) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.num_devices):
            self._random[index] = torch.Generator().manual_seed(seed).get_state()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self._random_state(index_of(device)).clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self._random[index_of(device)] = state.clone()

    # internals

    def _random_state(self, index: int) -> Tensor:
        return self._random.setdefault(index, torch.Generator().manual_seed(1234 + index).get_state())

    @contextlib.contextmanager
    def own_random_numbers(self, index: int) -> Iterator[None]:
        """Draw from the device's random numbers, not from the CPU's."""
        with self.lock:
            of_cpu = torch.get_rng_state()
            torch.set_rng_state(self._random_state(index))
            try:
                yield
            finally:
                self._random[index] = torch.get_rng_state()
                torch.set_rng_state(of_cpu)

    def next_stream(self) -> int:
        with self.lock:
            self._num_streams += 1
            return self._num_streams

    def main_stream(self, index: int) -> CopyStream:
        with self.lock:
            if index not in self._main:
                self._main[index] = CopyStream(index, number=0)
            return self._main[index]

    def allocate(self, tensor: Tensor, index: int) -> Tensor:
        """Give a new CPU tensor to a device: it counts until its memory is freed."""
        storage, memory = tensor.untyped_storage(), self._memory[index]
        num_bytes = storage.nbytes()
        with self.lock:
            if memory.used_bytes + num_bytes > memory.limit_bytes:
                raise torch.OutOfMemoryError(
                    f"{NAME} out of memory. Tried to allocate {num_bytes} bytes; {memory.used_bytes} of "
                    f"{memory.limit_bytes} are in use"
                )
            memory.used_bytes += num_bytes
            memory.peak_bytes = max(memory.peak_bytes, memory.used_bytes)
        weakref.finalize(storage, self._freed, index, num_bytes).atexit = False
        return relabelled(tensor, EXTENSION_KIND, index)

    def _freed(self, index: int, num_bytes: int) -> None:
        with self.lock:
            self._memory[index].used_bytes -= num_bytes

    def wrote(self, tensor: Tensor) -> None:
        """Remember when the main stream computed this."""
        if len(self._computed_at) > 10_000:
            self._computed_at.clear()
        self._computed_at[tensor.untyped_storage().data_ptr()] = self.num_computed

    def check_order(self, source: Tensor, stream: CopyStream) -> None:
        """Raise if a side stream copies what the main stream has computed since it was waited for."""
        if stream.number and self._computed_at.get(source.untyped_storage().data_ptr(), 0) > stream.seen:
            raise RuntimeError("a side stream copies a result of the main stream without waiting for it")


accelerator = TestAccelerator()


def current_stream(device: Any = None) -> CopyStream:
    current: CopyStream | None = getattr(accelerator._streams, "current", None)
    return current if current is not None else accelerator.main_stream(index_of(device))


def index_of(device: Any) -> int:
    if isinstance(device, int):
        return device
    return 0 if device is None else torch.device(device).index or 0


def relabelled(tensor: Tensor, kind: int, index: int) -> Tensor:
    """A tensor on another device in the same memory."""
    capsule = torch._C._to_dlpack(tensor.detach())
    address = _capsule_pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + _KIND_OFFSET).value = kind
    ctypes.c_int32.from_address(address + _INDEX_OFFSET).value = index
    return torch._C._from_dlpack(capsule)


def alias_of(tensor: Tensor) -> Tensor:
    return relabelled(tensor, CPU_KIND, 0)


def is_ours(item: Any) -> bool:
    return isinstance(item, Tensor) and item.device.type == NAME


def _fill_with_garbage(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
