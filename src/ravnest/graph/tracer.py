"""Traces a model (or a function that builds it), its loss and one example batch to a program.

A builder is called under fake tensors: its random fills are recorded, not executed, so no weights are allocated. An
existing model keeps its tensors, and the program refers to them. Model and loss are traced as one module
(`LossModule`); parameters and buffers keep the names that they have in the user's model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ravnest.errors import TraceError
from ravnest.graph.backward_extractor import extract_backward
from ravnest.graph.batch import (
    BatchLayout,
    Leaves,
    batch_size_of,
    example_tensors,
    flatten,
    split_batch,
    structure_difference,
    unflatten,
)
from ravnest.graph.export import FlatGraph, export_flat
from ravnest.graph.functionalize import FunctionalGraph, drop_unused, functionalize, written_value
from ravnest.graph.gradient_recorder import HOOKED
from ravnest.graph.init_recorder import InitLog, record, recording
from ravnest.graph.lazy import has_lazy, replaced_lazy
from ravnest.graph.lengths import at_shortest, find_lengths, input_values, narrowed
from ravnest.graph.pretrained import Pretrained, PretrainedWeights, match_weights
from ravnest.graph.program import Op, Program, StateSpec, Value, dtype_name, map_refs, refs
from ravnest.graph.shapes import infer

__all__ = ["trace"]

Loss = Callable[..., Any]
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")  # torch names constants after the code that uses them


class LossModule(nn.Module):
    """`loss(model(inputs), targets)` over the batch's flat tensors; calls `on_labels` with the names of its outputs."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | nn.Module | None,
        structure: Any,
        on_labels: Callable[[tuple[str, ...]], None],
        *,
        returns_prediction: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.structure = structure
        self.on_labels = on_labels
        self.returns_prediction = returns_prediction

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        batch = unflatten(self.structure, leaves)
        inputs = batch["inputs"]
        if isinstance(inputs, Mapping):
            output = self.model(**inputs)
        else:
            output = self.model(*inputs) if isinstance(inputs, list | tuple) else self.model(inputs)
        prediction = _prediction_of(output) if self.returns_prediction else ()  # before the loss, which may change it
        result = _loss_of_output(output) if self.loss is None else self.loss(output, batch["targets"])
        scalar, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        self._check(scalar, metrics)
        self.on_labels(("loss", *metrics))
        return (scalar, *(metric.detach() for metric in metrics.values()), *prediction)

    def _check(self, scalar: Any, metrics: Any) -> None:
        if not isinstance(scalar, Tensor):
            kind = {torch.SymFloat: "float", torch.SymInt: "int"}.get(type(scalar), type(scalar).__name__)
            raise TraceError(
                f"the loss is a {kind}, not a tensor: return the tensor itself, without .item() or float()"
            )
        if scalar.dim() != 0 or not scalar.is_floating_point():
            what = f"a {dtype_name(scalar.dtype)} tensor with {scalar.dim()} dimensions"
            raise TraceError(f"the loss is {what}; it must be a scalar: reduce it, for example with .mean()")
        if not isinstance(metrics, dict) or not all(isinstance(m, Tensor) for m in metrics.values()):
            raise TraceError("the second return value of the loss function must be a dict of tensors to report")


def _loss_of_output(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise TraceError("loss=None, but the model returns neither a scalar nor an output with a loss")
    return loss


def _prediction_of(output: Any) -> tuple[Tensor, ...]:
    """The scores of tokens by sample and position, if the model returns them."""
    if not isinstance(output, Tensor):
        output = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    is_prediction = isinstance(output, Tensor) and output.dim() == 3 and output.is_floating_point()
    return (output.clone(),) if is_prediction else ()


@contextmanager
def training_mode(module: LossModule) -> Iterator[None]:
    """Train the model in the modes of its parts, and restore them afterwards.

    A model in training mode keeps the parts that the user put into evaluation mode, such as frozen batch norms. A
    model that is in evaluation mode as a whole, as `from_pretrained` returns it, is put into training mode.
    """
    before = [(m, m.training) for m in module.modules()]
    if not module.model.training:
        if mixed := next((name for name, part in module.model.named_modules() if part.training), None):
            raise TraceError(
                f"the model is in evaluation mode, but its part {mixed} is in training mode: call model.train() first, "
                "then .eval() on the parts that are to stay in evaluation mode"
            )
        module.model.train()
    try:
        yield
    finally:
        for m, mode in before:
            m.training = mode


@dataclass
class ModuleState:
    """State of a traced module. `canonical` maps a value of the exported graph to the first one of the same tensor."""

    state: list[StateSpec]
    idle: list[StateSpec]  # parameters and buffers that the forward pass never reads
    ties: dict[str, str]
    tensors: dict[str, Tensor]
    canonical: dict[str, str]


def collect_state(module: LossModule, flat: FlatGraph) -> ModuleState:
    """Collect every parameter, buffer and constant once, under its public name."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    tensors_by_name: dict[str, Tensor] = {**parameters, **buffers, **flat.constants}
    persistent = set(module.state_dict(keep_vars=True))
    public = _public_names(tensors_by_name, set(flat.constants))
    collected = ModuleState([], [], {}, {}, {})
    first: dict[int, str] = {}
    for name, tensor in tensors_by_name.items():
        if id(tensor) in first:
            collected.ties[public[name]] = public[first[id(tensor)]]
        else:
            first[id(tensor)] = name
            collected.tensors[public[name]] = tensor
    value_of: dict[str, str] = {}
    for value, name in flat.state.items():
        original = first[id(tensors_by_name[name])]
        collected.canonical[value] = value_of.setdefault(original, value)
    read = {collected.canonical.get(name, name) for op in flat.ops if op.op != HOOKED for name in refs(op)}
    for name in first.values():
        value = value_of.get(name, "")
        kind = "parameter" if name in parameters else "buffer"
        item = _state(value, public[name], tensors_by_name[name], kind, name in persistent)
        (collected.state if value in read else collected.idle).append(item)
    return collected


def _state(value: str, target: str, tensor: Tensor, kind: str, persistent: bool) -> StateSpec:
    shape = tuple(int(d) for d in tensor.shape)
    trainable = kind == "parameter" and tensor.requires_grad
    return StateSpec(value, target, dtype_name(tensor.dtype), shape, kind, trainable, persistent)


def _public_names(tensors_by_name: Mapping[str, Tensor], constants: set[str]) -> dict[str, str]:
    """Names as in the model; those of the loss start with `loss.`, of constants with `constant.`."""
    names = {
        name: "constant." + _NOT_IN_NAMES.sub("_", name) if name in constants else name.removeprefix("model.")
        for name in tensors_by_name
    }
    if len(set(names.values())) < len(names):
        raise TraceError("the model has a submodule named 'loss' or 'constant', which are reserved names: rename it")
    return names


def trace(
    model: nn.Module | Callable[[], nn.Module] | Pretrained,
    loss: Loss | nn.Module | None,
    example_batch: Any,
    *,
    dynamic_batch: bool = True,
    others: Sequence[Any] = (),
    max_length: int | None = None,
) -> Program:
    """Trace `loss(model(inputs), targets)` in training mode.

    Args:
        model: A module, a function without arguments that builds one, or a function and a folder of weights.
        loss: Takes the model's output and the targets; returns a scalar, or a scalar and a dict of further tensors to
            report. If None, the batch is the inputs alone and the model returns the loss itself (a scalar, or an
            output with `.loss`).
        example_batch: A batch with the shapes and dtypes of all later ones, except for the sizes that vary.
        dynamic_batch: Whether the batch size, the first dimension of every tensor where it equals that of the first
            tensor, may vary later.
        others: Further batches, which show the sizes that vary.
        max_length: The largest size of a dimension that varies, apart from the batch size. See `find_lengths`.

    Raises:
        ValueError: if the batches do not match each other.
        TraceError: if the model or its loss cannot be turned into a program.
        WeightsError: if the folder's weights do not fit the model.
    """
    structure, examples = _flat_examples((example_batch, *others), has_targets=loss is not None)
    lengths = find_lengths(examples, max_length)
    inputs, leaves = input_values(examples, lengths, dynamic_batch=dynamic_batch), examples[0]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    module, log = _build(model, fake)
    labels: list[tuple[str, ...]] = []
    loss_module = LossModule(module, loss, structure, labels.append, returns_prediction=True)
    if has_lazy(loss_module):
        _initialise_lazy(loss_module, [leaf for _, leaf in leaves], log, fake)
    size = batch_size_of(leaves)
    with fake if log else nullcontext():
        tensors = example_tensors(leaves, inputs, max(2, size) if dynamic_batch else size)
    with training_mode(loss_module):
        flat = export_flat(loss_module, tensors, [_dynamic(v) for v in inputs])
    collected = collect_state(loss_module, flat)
    if log is not None:
        for tensor in collected.tensors.values():
            log.constant(tensor)  # literals of the forward pass, and tensors of the loss
    weights = None
    if isinstance(model, Pretrained):
        weights = match_weights(model, module, (*collected.state, *collected.idle), collected.ties)
        _check_initialisation(collected, weights, log)
    prediction = _take_prediction(flat, flat.outputs.pop()) if len(flat.outputs) > len(labels[-1]) else ""
    graph = _functional_graph(flat, collected)
    feed = BatchLayout(structure, loss is not None, inputs, narrowed(lengths, flat.ranges))
    return replace(_assemble(flat, graph, collected, feed, labels[-1], log, prediction), pretrained=weights)


def _check_initialisation(collected: ModuleState, weights: PretrainedWeights, log: InitLog | None) -> None:
    """Raise `TraceError` if tensors that the files lack cannot be initialised beside the loaded ones."""
    assert log is not None
    loaded = {name: collected.tensors[name] for name in weights.sources}
    others = {name: tensor for name, tensor in collected.tensors.items() if name not in loaded}
    log.init_beside(loaded, others, others)


def _flat_examples(batches: Sequence[Any], *, has_targets: bool) -> tuple[Any, list[Leaves]]:
    """The structure of the batches, which must be the same, and the tensors of each."""
    flat = [flatten(split_batch(batch, has_targets), "batch") for batch in batches]
    for number, (structure, leaves) in enumerate(flat):
        if difference := structure_difference(flat[0][0], structure, "batch"):
            raise ValueError(f"batch {number}: {difference}")
        for (path, tensor), (_, first) in zip(leaves, flat[0][1], strict=True):
            if tensor.dtype != first.dtype:
                kinds = f"{dtype_name(tensor.dtype)} in batch {number} and {dtype_name(first.dtype)} in the first"
                raise ValueError(f"{path} is {kinds}: convert it in the collator")
    return flat[0][0], [leaves for _, leaves in flat]


def _initialise_lazy(module: LossModule, leaves: Sequence[Tensor], log: InitLog | None, fake: FakeTensorMode) -> None:
    """Let lazy modules take their sizes from the first batch, as in their first forward pass."""
    if log is None:
        first_forward(module, leaves)
        return
    with recording(log, fake), replaced_lazy(module):
        first_forward(module, [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in leaves])


def first_forward(module: LossModule, leaves: Sequence[Tensor]) -> None:
    """A forward pass in evaluation mode, which gives lazy modules their sizes and changes nothing else."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    with torch.no_grad():
        module(*leaves)
    for part, mode in modes:
        part.training = mode


def _build(model: Any, fake: FakeTensorMode) -> tuple[nn.Module, InitLog | None]:
    if isinstance(model, nn.Module):
        return model, None
    if isinstance(model, Pretrained):
        return record(model.builder, fake)
    if not callable(model):
        raise ValueError(f"model must be a torch.nn.Module or a function that builds one, got a {type(model).__name__}")
    return record(model, fake)


def _dynamic(value: Value) -> dict[int, object]:
    dims: dict[int, object] = {
        dim: torch.export.Dim.DYNAMIC(min=2, max=cast(int, value.shape[dim])) for dim in value.varying
    }
    if value.shape and isinstance(value.shape[0], tuple):
        dims[0] = torch.export.Dim("batch", min=2, max=1 << 20)
    return dims


def _functional_graph(flat: FlatGraph, collected: ModuleState) -> FunctionalGraph:
    """The ops with one name per tied parameter, without needless writes and unused ops."""
    flat.ops = [map_refs(op, lambda name: collected.canonical.get(name, name)) for op in flat.ops]
    flat.state = {value: name for value, name in flat.state.items() if collected.canonical[value] == value}
    parameters = {s.name for s in collected.state if s.kind == "parameter"}
    return drop_unused(extract_backward(functionalize(flat, parameters)))


def _assemble(
    flat: FlatGraph,
    graph: FunctionalGraph,
    collected: ModuleState,
    feed: BatchLayout,
    labels: Sequence[str],
    log: InitLog | None,
    prediction: str,
) -> Program:
    names = {s.name: f"s{i}" for i, s in enumerate(collected.state)}
    names.update(zip(flat.inputs, (v.name for v in feed.values), strict=True))
    outputs = _label_outputs(graph, labels)
    names.update(zip(outputs, labels, strict=True))
    ops = _rename(graph.ops, names)
    state = tuple(
        msgspec.structs.replace(s, name=names[s.name], mutated=s.name in graph.mutated) for s in collected.state
    )
    shortest = at_shortest(feed.values, feed.lengths) if feed.lengths else None
    values, undescribed = infer(feed.values, state, ops, graph.sources, shortest)
    unsized = {names[name] for name in names if name.partition(".")[0] in flat.unsized or name in flat.unsized}
    uncuttable = {s.name for s in state if s.mutated} | undescribed | unsized
    ranges = (*graph.atomic_ranges, *_ranges(ops, uncuttable))
    tail = _ops_after(ops, names.get(prediction, ""), state)
    return Program(
        inputs=feed.values,
        outputs=tuple(values[label] for label in labels),
        state=state,
        idle=tuple(collected.idle),
        ops=ops,
        values=values,
        feed=feed,
        sources=tuple(graph.sources),
        atomic_ranges=ranges if tail is None else (*ranges, tail),
        ties=collected.ties,
        tensors=collected.tensors,
        init_log=log,
        prediction=None if tail is None else values[names[prediction]],
        untraced=flat.untraced,
    )


def _take_prediction(flat: FlatGraph, copy: str) -> str:
    """Remove the copy of the model's output; return the output's name, or nothing if it may be written to later."""
    index = next(i for i, op in enumerate(flat.ops) if op.outs == (copy,))
    prediction = str(flat.ops.pop(index).args[0])[1:]
    del flat.sources[index]
    made = next((i for i, op in enumerate(flat.ops) if prediction in op.outs), len(flat.ops))
    return "" if any(written_value(op) is not None for op in flat.ops[made + 1 :]) else prediction


def _ops_after(ops: Sequence[Op], prediction: str, state: Sequence[StateSpec]) -> tuple[int, int] | None:
    """The ops from the one that makes the prediction on, which the last stage must have; None if they need weights."""
    made = next((i for i, op in enumerate(ops) if prediction and prediction in op.outs), None)
    parameters = {s.name for s in state if s.kind == "parameter"}
    if made is None or any(name in parameters for op in ops[made + 1 :] for name in refs(op)):
        return None
    return made, len(ops) - 1


def _label_outputs(graph: FunctionalGraph, labels: Sequence[str]) -> list[str]:
    """Add an alias op for each output, so that the output can be named after its label."""
    for i, output in enumerate(graph.outputs):
        graph.ops.append(Op("aten.alias.default", (f"out.{i}",), ("%" + output,)))
        graph.sources.append(f"the loss function's {labels[i]!r}")
    return [f"out.{i}" for i in range(len(labels))]


def _rename(ops: Sequence[Op], names: dict[str, str]) -> tuple[Op, ...]:
    """Give all values short names: v0, v1, ... and v2.0, v2.1 for the items of a tuple."""
    for i, op in enumerate(ops):
        for part, out in enumerate(op.outs):
            if out:
                names.setdefault(out, f"v{i}" if len(op.outs) == 1 else f"v{i}.{part}")
    renamed = (map_refs(op, names.__getitem__) for op in ops)
    return tuple(msgspec.structs.replace(op, outs=tuple(names[o] if o else "" for o in op.outs)) for op in renamed)


def _ranges(ops: Sequence[Op], names: set[str]) -> list[tuple[int, int]]:
    """The range from the first to the last op that uses each of `names`, values that must not cross a cut."""
    touched: dict[str, list[int]] = {name: [] for name in names}
    for i, op in enumerate(ops):
        for name in (*op.outs, *refs(op)):
            if name in touched:
                touched[name].append(i)
    return [(at[0], at[-1]) for at in touched.values() if at and at[0] != at[-1]]
