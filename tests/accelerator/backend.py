"""The operations of the test accelerator, and its registration with torch.

`register` is an entry point of the group `torch.backends`, by which `import torch` loads a backend in other processes
(`tests.accelerator.installed`). Its settings are environment variables: `TESTACC_DEVICES`, `TESTACC_MEMORY` (bytes of
each device), `TESTACC_BF16` (0: it has no bfloat16).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.accelerator.devices import (
    EXTENSION_KIND,
    NAME,
    PendingCopy,
    WatchedSource,
    accelerator,
    alias_of,
    current_stream,
    index_of,
    is_ours,
    relabelled,
)

__all__ = ["register"]

_LOWER_PRECISION = (
    "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention",
)  # fmt: skip
_FLOAT32 = ("cross_entropy_loss", "nll_loss", "log_softmax", "softmax", "layer_norm", "mse_loss")


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return accelerator.is_available()

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def _empty(
    size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    made = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    return accelerator.allocate(made, index_of(device))


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    return accelerator.allocate(torch.empty_strided(size, stride, dtype=dtype), index_of(device))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    from_device, to_device = is_ours(source), is_ours(target)
    stream = current_stream(source.device if from_device else target.device)
    inside, into = (alias_of(t) if is_ours(t) else t for t in (source, target))
    counts = accelerator.counts
    if from_device and to_device:
        into.copy_(inside)
        accelerator.wrote(into)
        return target
    if from_device:
        counts.to_host += 1
        counts.to_host_shapes.append(tuple(source.shape))
        accelerator.check_order(inside, stream)
    else:
        counts.to_device += 1
        counts.to_device_shapes.append(tuple(source.shape))
    if not non_blocking:
        counts.synchronisations += 1
        stream.finish()
        into.copy_(inside)
    elif to_device and stream.number == 0:  # later operations of this stream come after the copy
        into.copy_(inside)
        stream.pending.append(WatchedSource(inside))
    else:
        stream.pending.append(PendingCopy(inside, into))
    return target


def _local_scalar(tensor: Tensor) -> Any:
    counts = accelerator.counts
    counts.to_host += 1
    counts.to_host_shapes.append(tuple(tensor.shape))
    counts.synchronisations += 1
    return alias_of(tensor).item()


def _resize(tensor: Tensor, size: Sequence[int], memory_format: Any = None) -> Tensor:
    if tuple(tensor.shape) != tuple(size):
        tensor.data = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    return tensor


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    backward = torch.ops.aten.convolution_backward.default
    return _run(backward, gradient, x, weight, [weight.shape[0]], *args)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention by the kernel that the CPU chooses."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    inside = [None if t is None else alias_of(t).requires_grad_(t.requires_grad) for t in (q, k, v)]
    choice = torch.ops.aten._fused_sdp_choice(
        *inside, None if mask is None else alias_of(mask), dropout, is_causal, **options
    )
    if choice == 1:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, dropout, is_causal, attn_mask=mask, scale=scale)[0]  # type: ignore[no-any-return]
    return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, is_causal, **options)[0]  # type: ignore[no-any-return]


def _mapped(function: Callable[[Any], Any], item: Any) -> Any:
    """As torch's `tree_map`, in a third of its time."""
    if isinstance(item, list | tuple):
        return type(item)([_mapped(function, each) for each in item])
    return function(item)


class _Arguments:
    """The CPU aliases of an operation's arguments."""

    def __init__(self) -> None:
        self.aliases: dict[int, tuple[Tensor, Tensor]] = {}
        self.given: list[Tensor] = []
        self.devices: set[int] = set()

    def unwrap(self, item: Any) -> Any:
        if isinstance(item, torch.device):
            self.devices.add(index_of(item))
            return torch.device("cpu")
        if not isinstance(item, Tensor):
            return item
        self.given.append(item)
        if item.device.type != NAME:
            return item
        if id(item) not in self.aliases:
            # an empty `out` is resized, which memory of another tensor cannot be
            alias = alias_of(item) if item.numel() else item.new_empty(item.shape, device="cpu")
            self.aliases[id(item)] = item, alias
        return self.aliases[id(item)][1]

    def device_index(self, op: Any) -> int:
        """The device to compute on; raises if the arguments are on several."""
        indices = {tensor.device.index for tensor, _ in self.aliases.values()}
        strangers = any(t.dim() for t in self.given if t.device.type != NAME)
        if len(indices) > 1 or (indices and strangers):
            found = [str(t.device) for t in self.given]
            raise RuntimeError(f"{op}: expected all tensors to be on the same device, got {found}")
        return next(iter(indices or self.devices), 0)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any operation on the CPU aliases of its arguments."""
    arguments = _Arguments()
    own = _mapped(arguments.unwrap, args)
    named = {key: _mapped(arguments.unwrap, item) for key, item in kwargs.items()}
    index = arguments.device_index(op)
    if current_stream(index).number:
        raise RuntimeError(f"{op}: a side stream is for copies")
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    with accelerator.own_random_numbers(index) if is_random else contextlib.nullcontext():
        result = op(*own, **named)
    aliases = arguments.aliases.values()
    for tensor, alias in aliases:
        if alias.shape != tensor.shape:
            tensor.data = accelerator.allocate(alias, index)
    originals = {id(alias): tensor for tensor, alias in aliases}
    memory = {alias.untyped_storage().data_ptr() for _, alias in aliases}
    accelerator.num_computed += 1

    def wrap(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        accelerator.wrote(item)
        if id(item) in originals:
            return originals[id(item)]
        if item.untyped_storage().data_ptr() in memory and item.numel():
            return relabelled(item, EXTENSION_KIND, index)
        return accelerator.allocate(item, index)

    return _mapped(wrap, result)


_AUTOCAST: Any = getattr(torch._C.DispatchKey, "AutocastPrivateUse1")  # noqa: B009  (torch's stubs lack it)


def _cast(name: str, *, is_lower: bool) -> Callable[..., Any]:
    """An operation that autocast runs in its lower precision, or in float32."""
    function = getattr(torch.ops.aten, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if is_lower else torch.float32

        def cast(item: Any) -> Any:
            return item.to(dtype) if is_ours(item) and item.is_floating_point() else item

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return function(*_mapped(cast, args), **{key: _mapped(cast, item) for key, item in kwargs.items()})

    return run


_libraries: list[torch.library.Library] = []


def register() -> None:
    """Make the devices known to torch; later calls do nothing."""
    if _libraries:
        return
    accelerator.num_devices = int(os.environ.get("TESTACC_DEVICES", "1"))
    accelerator.has_bf16 = os.environ.get("TESTACC_BF16", "1") != "0"
    limit_bytes = os.environ.get("TESTACC_MEMORY")
    for index in range(accelerator.num_devices):
        accelerator.limit(None if limit_bytes is None else int(limit_bytes), index)
    _setup_privateuseone_for_python_backend(NAME, accelerator, _Hooks())
    aten = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
        "_local_scalar_dense": _local_scalar,
        "resize_": _resize,
        "record_stream": lambda tensor, stream: None,
        "native_layer_norm": partial(_run, torch.ops.aten.native_layer_norm.default),
        "native_group_norm": partial(_run, torch.ops.aten.native_group_norm.default),
        "convolution_overrideable": partial(_run, torch.ops.aten.convolution.default),
        "convolution_backward_overrideable": _convolution_backward,
    }.items():
        aten.impl(name, function, "PrivateUse1")  # type: ignore[no-untyped-call]
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        aten.impl("scaled_dot_product_attention", _attention, key)  # type: ignore[no-untyped-call]
    for name in (*_LOWER_PRECISION, *_FLOAT32):
        for overload in getattr(torch.ops.aten, name).overloads():
            if "out" not in overload:
                qualified = name if overload == "default" else f"{name}.{overload}"
                function = _cast(name, is_lower=name in _LOWER_PRECISION)
                aten.impl(qualified, function, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    everything = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    everything.fallback(_run, "PrivateUse1")  # type: ignore[no-untyped-call]
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    _libraries.extend((aten, everything))
