"""The devices that the nodes of a local run compute on, with their memory and speed.

`auto` gives each node an accelerator of its own while there are any, in the order of their numbers, and the others the
processor. Accelerators are measured in another process, unless memory and speeds are given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from ravnest.config import TrainingConfig
from ravnest.core.units import UNLIMITED_BYTES
from ravnest.graph.device import AUTO, available_devices, choose_device
from ravnest.node.measurement import MeasuredSpeed, measure_device

__all__ = ["LocalDevices", "local_devices"]

_CPU = "cpu"


@dataclass(frozen=True)
class LocalDevices:
    """The device of each node, its memory, and its speed relative to a core of the processor; None: as without it."""

    names: tuple[str, ...]
    memory_bytes: tuple[int, ...] | None
    speeds: tuple[float, ...] | None

    @property
    def on_processor(self) -> tuple[bool, ...]:
        return tuple(name == _CPU for name in self.names)


def local_devices(config: TrainingConfig) -> LocalDevices:
    """Choose and measure the devices of a local run; raises `ValueError` for one that does not exist."""
    names = _chosen(config.device_of)
    memory_bytes, speeds = config.memory_bytes, config.speed_of
    if all(name == _CPU for name in names):
        return LocalDevices(names, memory_bytes, speeds)
    threads = config.num_threads
    if memory_bytes is None:
        room = {name: _measured(name, threads).memory_bytes // names.count(name) for name in {*names} - {_CPU}}
        memory_bytes = tuple(room.get(name, UNLIMITED_BYTES) for name in names)
    if speeds is None:
        of_processor = _measured(_CPU, threads).gflops
        gflops = {name: _measured(name, threads).gflops / names.count(name) for name in {*names} - {_CPU}}
        speeds = tuple(gflops.get(name, of_processor) / of_processor for name in names)
    return LocalDevices(names, memory_bytes, speeds)


def _chosen(wanted: Sequence[str]) -> tuple[str, ...]:
    given = [None if text == AUTO else str(choose_device(text)) for text in wanted]
    free = [str(device) for device in available_devices() if str(device) not in given and device.type != _CPU]
    return tuple(name if name is not None else (free.pop(0) if free else _CPU) for name in given)


@cache
def _measured(device: str, threads: int) -> MeasuredSpeed:
    """Measure in a thread: this one may have an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(measure_device(device, threads))).result()
