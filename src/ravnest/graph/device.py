"""The device that a worker computes on: the processor (`cpu`) or an accelerator that torch knows.

    cpu        cuda:0 (NVIDIA, and AMD with ROCm)        xpu:0 (Intel)        mps (Apple)        those of other backends

Every question about a device is answered here, from the module that torch keeps for its kind (`torch.cuda`, ...). These
modules have functions of the same names, and not all of them: what a module cannot answer is None, or has a default.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ravnest.core.config import require
from ravnest.errors import RavnestError

__all__ = [
    "AUTO",
    "CPU",
    "RngState",
    "available_devices",
    "check_device",
    "choose_device",
    "device_memory",
    "device_name",
    "has_bfloat16",
    "is_out_of_memory",
    "module_of",
    "peak_device_bytes",
    "release_memory",
    "rng_state",
    "set_rng_state",
    "synchronize",
]

AUTO = "auto"
CPU = torch.device("cpu")

RngState = tuple[Tensor, Tensor | None]  # of the processor, and of the accelerator


class DeviceMemory(NamedTuple):
    total_bytes: int
    free_bytes: int


def module_of(device: torch.device) -> Any:
    """Return torch's module for a kind of accelerator, such as `torch.cuda`."""
    return torch.get_device_module(device)


def available_devices() -> list[torch.device]:
    """Return the accelerators of this PC that work now, in the order of their numbers, and the processor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a driver that is too old: the device then does not work
        kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return [CPU]
    if kind.type == "mps":  # there is one, without a number
        return [torch.device("mps"), CPU]
    return [*(torch.device(kind.type, i) for i in range(module_of(kind).device_count())), CPU]


def choose_device(text: str = AUTO) -> torch.device:
    """Return the device of this name; `auto` is the first accelerator, or the processor.

    Raises `ValueError` if there is no such device.
    """
    known = available_devices()
    if text == AUTO:
        return known[0]
    names = ", ".join(map(str, known))
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"device must be auto or one of this PC's, {names}, got {text!r}") from None
    if ":" not in text or device.type == "cpu":
        device = next((each for each in known if each.type == device.type), device)
    require(device in known, f"there is no device {text} on this PC; its devices are {names}")
    return device


def device_name(device: torch.device) -> str:
    """Return the name that the maker gave an accelerator; its kind, if torch does not tell."""
    if device.type == "cpu":
        return "processor"
    ask = getattr(module_of(device), "get_device_name", None)
    return device.type if ask is None else str(ask(device))


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of an accelerator, None if it shares that of the PC or torch cannot tell."""
    if device.type in ("cpu", "mps"):
        return None
    try:
        free_bytes, total_bytes = module_of(device).mem_get_info(device)
    except (AttributeError, RuntimeError):
        return None
    return DeviceMemory(int(total_bytes), int(free_bytes))


def peak_device_bytes(device: torch.device) -> int:
    """Return the most memory that this process has had on an accelerator, by its allocator; 0 if it is unknown."""
    if device.type == "cpu":
        return 0
    ask = getattr(module_of(device), "max_memory_allocated", None)
    if ask is not None:
        return int(ask(device))
    present = getattr(module_of(device), "driver_allocated_memory", None)
    return 0 if present is None else int(present())


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device computes in bfloat16 by itself."""
    if device.type == "cpu":
        return True
    ask = getattr(module_of(device), "is_bf16_supported", None)
    if ask is None:
        return True
    return bool(ask(including_emulation=False) if device.type in ("cuda", "xpu") else ask())


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done all that it was given."""
    if device.type == "mps":
        module_of(device).synchronize()
    elif device.type != "cpu":
        module_of(device).synchronize(device)


def check_device(device: torch.device) -> None:
    """Compute a sum on an accelerator; raises `RavnestError` if that fails."""
    if device.type == "cpu":
        return
    try:
        total = float(torch.ones(2, device=device).sum())
    except RuntimeError as error:
        raise RavnestError(f"{device} does not compute: {str(error).splitlines()[0][:300]}") from error
    if total != 2.0:
        raise RavnestError(f"{device} computes 1 + 1 = {total:g}: it is broken, or its driver is")


def release_memory(device: torch.device) -> None:
    """Return memory that torch keeps for later tensors, and measure the peak from now on."""
    if device.type == "cpu":
        return
    for name in ("empty_cache", "reset_peak_memory_stats"):
        if (call := getattr(module_of(device), name, None)) is not None:
            call()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, on a device or in the PC."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def rng_state(device: torch.device) -> RngState:
    """Return the states of the random generators that a stage on this device draws from."""
    own = None if device.type == "cpu" else module_of(device).get_rng_state(device)
    return torch.get_rng_state(), own


def set_rng_state(device: torch.device, state: RngState) -> None:
    """Continue with the random numbers after this state."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        module_of(device).set_rng_state(state[1], device)
