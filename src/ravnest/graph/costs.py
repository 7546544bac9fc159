"""Costs of every op: FLOPs and bytes, counted by running the program once on fake tensors at one microbatch size.

FLOPs are counted by torch's own counter, forward and backward; an op unknown to it counts one operation per element
of its results. Saved bytes are found by hooking the tensors that autograd saves: a storage saved by several ops is kept
once, so the bytes of a range of ops are those of the storages that any of them saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ravnest.graph.cut import Cutter
from ravnest.graph.interpreter import run_op
from ravnest.graph.ops import ALLOWED
from ravnest.graph.program import Op, Program, num_bytes, refs, storage_id
from ravnest.graph.shapes import fake_inputs, fake_state

__all__ = ["Costs", "CutCost", "OpCost", "SavedStorage", "measure_costs"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class OpCost:
    forward_flops: int
    backward_flops: int
    result_bytes: int
    parameter_bytes: int  # of parameters first read by this op


@dataclass(frozen=True)
class CutCost:
    """Bytes of one microbatch over a cut."""

    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class SavedStorage:
    """A storage that backward needs, and the ops that save it."""

    num_bytes: int
    ops: tuple[int, ...]


@dataclass(frozen=True)
class Costs:
    """Costs of every op and every cut (`cuts[c]` is the cut before op c) for microbatches of `batch` samples."""

    batch: int
    ops: tuple[OpCost, ...]
    cuts: tuple[CutCost, ...]
    saved: tuple[SavedStorage, ...]

    def flops(self, start: int, stop: int) -> int:
        return sum(op.forward_flops + op.backward_flops for op in self.ops[start:stop])

    def parameter_bytes(self, start: int, stop: int) -> int:
        return sum(op.parameter_bytes for op in self.ops[start:stop])

    def saved_bytes(self, start: int, stop: int) -> int:
        """Bytes that a stage of ops `start` to `stop` saves per microbatch until its backward."""
        return sum(s.num_bytes for s in self.saved if any(start <= i < stop for i in s.ops))


def measure_costs(program: Program, batch: int) -> Costs:
    """Costs at a microbatch size of `batch` samples."""
    cutter = Cutter(program)
    cuts = tuple(_cut_cost(cutter, c, batch) for c in range(len(program.ops) + 1))
    with FakeTensorMode():
        ops, saved = _Meter(program, batch).run()
    return Costs(batch, ops, cuts, saved)


def _cut_cost(cutter: Cutter, cut: int, batch: int) -> CutCost:
    crossing = cutter.crossing(cut)
    return CutCost(sum(num_bytes(v, batch) for v in crossing), sum(num_bytes(v, batch) for v in crossing if v.grad))


class _Meter:
    """Runs the program op by op and records FLOPs, results and saved storages."""

    def __init__(self, program: Program, batch: int) -> None:
        self.program = program
        state = fake_state(program.state)
        self.env: dict[str, Any] = {s.name: state[s.target] for s in program.state}
        self.env.update(zip((v.name for v in program.inputs), fake_inputs(program.inputs, batch), strict=True))
        self.unread_bytes = {s.name: s.num_bytes for s in program.state if s.kind == "parameter"}
        self.state_storages = {storage_id(t) for t in state.values()}
        self.saved: dict[int, tuple[int, list[int]]] = {}
        self.alive: list[Any] = []  # keeps storage addresses unique

    def run(self) -> tuple[tuple[OpCost, ...], tuple[SavedStorage, ...]]:
        with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
            ops = tuple(self._op(i, counter) for i in range(len(self.program.ops)))
        return ops, tuple(SavedStorage(size, tuple(users)) for size, users in self.saved.values())

    def _op(self, i: int, counter: FlopCounterMode) -> OpCost:
        op = self.program.ops[i]
        before = counter.get_total_flops()
        detached = {n: _detached(self.env[n]) for n in refs(op)}
        read = list(detached.values())
        writes = ALLOWED.get(op.op) == "writes"  # autograd rejects writes to a leaf
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saver(i), lambda tensor: tensor)
        with hooks, torch.no_grad() if writes else nullcontext():
            run_op(op, detached, _CPU)
        after = counter.get_total_flops()
        results = [detached[o] for o in op.outs if o]
        self.env.update((o, detached[o]) for o in op.outs if o)
        has_backward = _backward(results, read)
        backward = counter.get_total_flops() - after
        elements = _elements(op.op, results)
        return OpCost(
            forward_flops=(after - before) or elements,
            backward_flops=(backward or _backward_elements(op, elements, results)) if has_backward else 0,
            result_bytes=sum(t.numel() * t.element_size() for t in results if isinstance(t, Tensor)),
            parameter_bytes=sum(self.unread_bytes.pop(n, 0) for n in refs(op)),
        )

    def _saver(self, i: int) -> Callable[[Tensor], Tensor]:
        def save(tensor: Tensor) -> Tensor:
            storage = storage_id(tensor)
            if storage not in self.state_storages:
                users = self.saved.setdefault(storage, (tensor.untyped_storage().nbytes(), []))[1]
                self.alive.append(tensor)
                if i not in users:
                    users.append(i)
            return tensor

        return save


def _detached(value: Any) -> Any:
    """The tensor without its autograd history, so that a backward covers this op only."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _backward(results: Iterable[Any], read: Iterable[Any]) -> bool:
    """Run the backward of one op under the FLOP counter; whether there is one."""
    outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
    inputs = [t for t in read if isinstance(t, Tensor) and t.requires_grad]
    if outputs and inputs:
        gradients = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
    return bool(outputs and inputs)


def _elements(name: str, results: Iterable[Any]) -> int:
    if ALLOWED.get(name, "views") == "views":
        return 0
    return sum(t.numel() for t in results if isinstance(t, Tensor))


def _backward_elements(op: Op, elements: int, results: Iterable[Any]) -> int:
    """Elements that a backward pass computes: about those of the results in every operation of its own."""
    if op.backward is None:
        return elements
    count = sum(t.numel() for t in results if isinstance(t, Tensor))
    return count * sum(ALLOWED.get(inner.op, "views") != "views" for inner in op.backward.ops)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> int:
    """Two products for each pair of positions: q k^T and scores v."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


def _forward_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return _attention_flops(query, key, value)


def _backward_attention(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return 5 * _attention_flops(query, key, value) // 2  # recomputed scores, and two products for each of the two


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_attention,
}
