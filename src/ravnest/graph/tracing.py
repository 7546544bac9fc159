"""`trace`: a model (or what builds it), its loss and one example batch become a program.

A builder is called under fake tensors: its random fills are recorded instead of done, so no weight ever exists
here. A model that exists keeps its tensors; the program refers to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .batch import Feed, batch_size_of, example_tensors, flatten, input_name, split_batch
from .export import Flat, export_flat
from .functional import Functional, drop_unused, functionalise
from .infer import infer
from .objective import Loss, Objective, Owned, collect, training
from .program import Op, Program, Value, dtype_name, map_refs, refs
from .recorder import InitLog, record

__all__ = ["trace"]


def trace(
    model: nn.Module | Callable[[], nn.Module],
    loss: Loss | nn.Module | None,
    example_batch: Any,
    *,
    dynamic_batch: bool = True,
) -> Program:
    """The program that computes `loss(model(inputs), targets)` in training mode.

    `model` is a module, or a function without arguments that builds one. `loss` takes the model's output and the
    targets and returns a scalar, or a scalar and a dict of further tensors to report. With `loss=None` the batch
    is the inputs alone and the model returns the loss itself (a scalar, or an output with `.loss`).
    The first dimension of every tensor in the batch that equals the batch size may vary later.
    """
    structure, leaves = flatten(split_batch(example_batch, has_targets=loss is not None), "batch")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    module, log = _build(model, fake)
    labels: list[tuple[str, ...]] = []
    objective = Objective(module, loss, structure, labels.append)
    size = batch_size_of(leaves)
    with fake if log else nullcontext():
        examples = example_tensors(leaves, max(2, size) if dynamic_batch else size)
    inputs = _input_values(leaves, size if dynamic_batch else None)
    with training(objective):
        flat = export_flat(objective, examples, [_dynamic(v) for v in inputs])
    owned = collect(objective, flat)
    body = _body(flat, owned)
    feed = Feed(structure, loss is not None, inputs)
    return _assemble(flat, body, owned, feed, labels[-1], log)


def _build(model: Any, fake: FakeTensorMode) -> tuple[nn.Module, InitLog | None]:
    if isinstance(model, nn.Module):
        return model, None
    if not callable(model):
        raise ValueError(f"model must be a torch.nn.Module or a function that builds one, not {type(model).__name__}")
    return record(model, fake)


def _input_values(leaves: Sequence[tuple[str, Tensor]], batch: int | None) -> tuple[Value, ...]:
    taken: set[str] = set()
    return tuple(
        Value(
            input_name(path, taken),
            dtype_name(tensor.dtype),
            tuple((1, 0) if i == 0 and d == batch else int(d) for i, d in enumerate(tensor.shape)),
        )
        for path, tensor in leaves
    )


def _dynamic(value: Value) -> dict[int, object]:
    if not value.shape or isinstance(value.shape[0], int):
        return {}
    return {0: torch.export.Dim("batch", min=2, max=1 << 20)}


def _body(flat: Flat, owned: Owned) -> Functional:
    """The ops with every tied parameter under one name, without needless writes and unused ops."""
    flat.ops = [map_refs(op, lambda name: owned.same.get(name, name)) for op in flat.ops]
    flat.state = {value: name for value, name in flat.state.items() if owned.same[value] == value}
    parameters = {s.name for s in owned.state if s.kind == "parameter"}
    return drop_unused(functionalise(flat, parameters))


def _assemble(
    flat: Flat, body: Functional, owned: Owned, feed: Feed, labels: Sequence[str], log: InitLog | None
) -> Program:
    names = {s.name: f"s{i}" for i, s in enumerate(owned.state)}
    names.update(zip(flat.inputs, (v.name for v in feed.values), strict=True))
    outputs = _label_outputs(body, labels)
    names.update(zip(outputs, labels, strict=True))
    ops = _rename(body.ops, names)
    state = tuple(msgspec.structs.replace(s, name=names[s.name], mutated=s.name in body.mutated) for s in owned.state)
    values, unknown = infer(feed.values, state, ops, body.sources)
    together = {s.name for s in state if s.mutated} | unknown
    return Program(
        inputs=feed.values,
        outputs=tuple(values[label] for label in labels),
        state=state,
        idle=tuple(owned.idle),
        ops=ops,
        values=values,
        feed=feed,
        sources=tuple(body.sources),
        islands=(*body.islands, *_stretches(ops, together)),
        ties=owned.ties,
        tensors=owned.tensors,
        log=log,
    )


def _label_outputs(body: Functional, labels: Sequence[str]) -> list[str]:
    """Names of the program's outputs, each made by an op of its own so that it can carry its label."""
    for i, output in enumerate(body.outputs):
        body.ops.append(Op("aten.alias.default", (f"out.{i}",), ("%" + output,)))
        body.sources.append(f"the loss function's {labels[i]!r}")
    return [f"out.{i}" for i in range(len(labels))]


def _rename(ops: Sequence[Op], names: dict[str, str]) -> tuple[Op, ...]:
    """Short names for all values: v0, v1, ... and v2.0, v2.1 for the parts of a tuple."""
    for i, op in enumerate(ops):
        for part, out in enumerate(op.outs):
            if out:
                names.setdefault(out, f"v{i}" if len(op.outs) == 1 else f"v{i}.{part}")
    renamed = (map_refs(op, names.__getitem__) for op in ops)
    return tuple(msgspec.structs.replace(op, outs=tuple(names[o] if o else "" for o in op.outs)) for op in renamed)


def _stretches(ops: Sequence[Op], names: set[str]) -> list[tuple[int, int]]:
    """From the first to the last op that touches each of `names`, values that must not cross a cut."""
    touched: dict[str, list[int]] = {name: [] for name in names}
    for i, op in enumerate(ops):
        for name in (*op.outs, *refs(op)):
            if name in touched:
                touched[name].append(i)
    return [(at[0], at[-1]) for at in touched.values() if at and at[0] != at[-1]]
