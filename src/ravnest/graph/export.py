"""Exports a model and its loss to a flat list of aten calls, by `torch.export`.

The exported graph is walked once: regions without gradients or autocast are inlined and their ops flagged, assertions
are dropped, tuple results are named at their producer (so that a tuple never crosses a cut), and Python arithmetic on
sizes becomes `sym.*`. A construct that cannot be written as data is rejected with its line in the model.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ravnest.errors import TraceError, UnsupportedOp
from ravnest.graph.data_checks import ValueReads, passing_checks
from ravnest.graph.export_errors import IN_TORCH, another_configuration, explained
from ravnest.graph.fake_kernels import bounded_shapes
from ravnest.graph.gradient_recorder import (
    CUSTOM_GRADIENT,
    GRADIENT_OF,
    HOOK,
    HOOKED,
    GradientRecorder,
    UntracedBackward,
)
from ravnest.graph.ops import ALLOWED, FAMILIES, functional_form
from ravnest.graph.program import Arg, Op, dtype_name
from ravnest.graph.quiet import quiet_export
from ravnest.graph.recorded_forms import recorded_forms

__all__ = ["FlatGraph", "Ref", "encode_call", "export_flat", "op_name", "without_out"]

_DROPPED = (
    "aten._assert_async.msg", "aten._assert_scalar.default", "aten._assert_tensor_metadata.default",
    "aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default",
)  # fmt: skip
_RENAMED = {  # the same operation under its name on the allow-list
    "aten.__and__.Tensor": "aten.bitwise_and.Tensor",
    "aten.__and__.Scalar": "aten.bitwise_and.Scalar",
    "aten.__or__.Tensor": "aten.bitwise_or.Tensor",
    "aten.__or__.Scalar": "aten.bitwise_or.Scalar",
    "aten.__xor__.Tensor": "aten.bitwise_xor.Tensor",
    "aten.__iand__.Tensor": "aten.bitwise_and_.Tensor",
    "aten.__iand__.Scalar": "aten.bitwise_and_.Scalar",
    "aten.__ior__.Tensor": "aten.bitwise_or_.Tensor",
    "aten.__ior__.Scalar": "aten.bitwise_or_.Scalar",
    "aten.__ixor__.Tensor": "aten.bitwise_xor_.Tensor",
    "aten.__ixor__.Scalar": "aten.bitwise_xor_.Scalar",
    "aten.empty.memory_format": "aten.zeros.default",  # never expose uninitialised memory of a node
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
    "aten.to.prim_Device": "aten.to.device",
    "aten.view.default": "aten.reshape.default",  # what crosses a cut is contiguous, which a view may not expect
    "aten._unsafe_view.default": "aten.reshape.default",
    "transformers.grouped_mm_fallback.default": "aten._grouped_mm.default",  # what it calls when it is not traced
}
_PYTHON: dict[Callable[..., Any], str] = {
    operator.add: "sym.add", operator.sub: "sym.sub", operator.mul: "sym.mul",
    operator.floordiv: "sym.floordiv", operator.truediv: "sym.truediv", operator.mod: "sym.mod",
    operator.neg: "sym.neg", operator.eq: "sym.eq", operator.ne: "sym.ne", operator.lt: "sym.lt",
    operator.le: "sym.le", operator.gt: "sym.gt", operator.ge: "sym.ge", torch.sym_max: "sym.max",
    torch.sym_min: "sym.min", torch.sym_float: "sym.float", torch.sym_int: "sym.int", math.ceil: "sym.ceil",
    math.floor: "sym.floor", math.trunc: "sym.trunc", torch.sym_sum: "sym.sum",
}  # fmt: skip
_WITH_NUMBER = {  # ops of a number and a tensor, and those of the tensor and the number
    "aten.add.Tensor": "aten.add.Tensor", "aten.mul.Tensor": "aten.mul.Tensor", "aten.sub.Tensor": "aten.rsub.Scalar",
}  # fmt: skip
_FORMATS = {
    torch.contiguous_format: "~contiguous_format",
    torch.channels_last: "~channels_last",
    torch.channels_last_3d: "~channels_last_3d",
    torch.preserve_format: "~preserve_format",
}
_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')


class Ref(str):
    """A reference `%name` to a value, as opposed to a string constant of the model."""


@dataclass
class FlatGraph:
    """The exported graph as a list, with the graph's own names and in-place calls."""

    ops: list[Op] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)  # value name -> name in the module
    dtypes: dict[str, str] = field(default_factory=dict)  # of the tensors among the values
    constants: dict[str, Tensor] = field(default_factory=dict)  # name in the module -> tensor
    ranges: list[dict[int, tuple[int, int]]] = field(default_factory=list)  # by input: bounds of varying dimensions
    unsized: set[str] = field(default_factory=set)  # values whose sizes depend on values, as those of a mask
    untraced: tuple[str, ...] = ()  # backward passes of the model's own that are left to autograd


def export_flat(module: nn.Module, inputs: Sequence[Tensor], dims: Sequence[Mapping[int, object]]) -> FlatGraph:
    """Export `module(*inputs)` and flatten it. `dims` are the dimensions that vary."""
    skipped: dict[Any, str] = {}
    while True:
        recorder = GradientRecorder(module, skipped)
        try:
            flat = _flatten(_export(module, inputs, dims, recorder))
        except UntracedBackward as error:  # again, without it
            recorder.skip(error)
            continue
        flat.untraced = tuple(skipped.values())
        return flat


def _export(
    module: nn.Module, inputs: Sequence[Tensor], dims: Sequence[Mapping[int, object]], recorder: GradientRecorder
) -> torch.export.ExportedProgram:
    reads = ValueReads()
    try:
        with (
            quiet_export(), passing_checks(reads.refused), reads, recorded_forms(), bounded_shapes(),
            recorder.recording(),
        ):  # fmt: skip
            return torch.export.export(module, tuple(inputs), dynamic_shapes=(tuple(dims),), strict=False)
    except TraceError:
        raise
    except Exception as error:  # any exception here is raised by the user's model
        raise explained(error, reads.skips) from error


def _flatten(exported: torch.export.ExportedProgram) -> FlatGraph:
    flat = FlatGraph()
    signature = exported.graph_signature
    targets = {spec.arg.name: spec for spec in signature.input_specs}
    env: dict[Node, Any] = {}
    for node in exported.graph.find_nodes(op="placeholder"):
        env[node] = Ref("%" + node.name)
        spec = targets[node.name]
        if isinstance(node.meta["val"], Tensor):
            flat.dtypes[node.name] = dtype_name(node.meta["val"].dtype)
        if spec.kind.name == "USER_INPUT":
            flat.inputs.append(node.name)
            flat.ranges.append(_ranges(node.meta["val"], exported.range_constraints))
        elif spec.kind.name in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            flat.state[node.name] = str(spec.target)
            if spec.kind.name == "CONSTANT_TENSOR":
                flat.constants[str(spec.target)] = exported.constants[str(spec.target)]
        else:
            raise TraceError(
                f"the model uses {str(spec.target).removeprefix('model.')}, an object that is no tensor and cannot be "
                "written as data: if it is a torch.Generator of its own, draw from torch's generator instead"
            )
    outputs = _Flattener(flat).region(exported.graph_module, env, "", no_grad=False, no_autocast=False)
    for output, out_spec in zip(outputs, signature.output_specs, strict=True):
        if out_spec.kind.name not in ("USER_OUTPUT", "LOSS_OUTPUT"):
            raise TraceError(f"the model changes its {out_spec.target} in a way that cannot be written as data")
        if not isinstance(output, Ref):
            raise TraceError(f"the loss function must return a tensor that depends on the model, got {output!r}")
        flat.outputs.append(output[1:])
    return flat


def _ranges(tensor: Tensor, constraints: Mapping[Any, Any]) -> dict[int, tuple[int, int]]:
    """The bounds of the dimensions of an input that are symbols of their own."""
    sizes: list[Any] = list(tensor.shape)
    symbols = {dim: size.node.expr for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)}
    found = {dim: constraints[symbol] for dim, symbol in symbols.items() if symbol in constraints}
    return {dim: (int(bounds.lower), int(bounds.upper)) for dim, bounds in found.items()}


class _Flattener:
    """Appends the ops of a graph and of its nested regions to a flat list."""

    def __init__(self, flat: FlatGraph) -> None:
        self.flat = flat
        self.backward: int | None = None  # the backward pass that is being flattened
        self.checked: set[Node] = set()

    def region(
        self, module: GraphModule, env: dict[Node, Any], prefix: str, *, no_grad: bool, no_autocast: bool
    ) -> Any:
        self.checked |= _only_checked(module.graph)
        for node in module.graph.nodes:
            if node.op == "get_attr":
                env[node] = getattr(module, str(node.target))
            elif node.op == "output":
                return _substitute(node.args[0], env)
            elif node.op == "call_function":
                self._call(node, env, prefix, no_grad, no_autocast)
        raise AssertionError("a graph without output")

    def _call(self, node: Node, env: dict[Node, Any], prefix: str, no_grad: bool, no_autocast: bool) -> None:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            env[node] = self._inline(node, env, prefix, no_grad, no_autocast)
            return
        if node in self.checked:
            env[node] = None
            return
        if target is operator.getitem:
            env[node] = _substitute(node.args[0], env)[node.args[1]]
            return
        name = op_name(target)
        if name in _DROPPED:
            return
        self._check_backward(name, node)
        if name == "aten.sym_numel.default":
            self._num_elements(node, env, prefix)
            return
        if "out" in node.kwargs and (functional := without_out(target)) in ALLOWED:
            self._call_and_copy(node, functional, env, prefix, no_grad, no_autocast)
            return
        is_known = name in ALLOWED or name.startswith(("sym.", "ravnest.")) or name == "aten.sym_size.int"
        if not is_known and not _has_shape_of_mask(node):
            _check_in_place(name, node)
        outs, env[node] = _outs(node, prefix)
        if isinstance(node.meta["val"], Tensor):
            self.flat.dtypes[outs[0]] = dtype_name(node.meta["val"].dtype)
        if free_unbacked_symbols(node.meta["val"]):
            self.flat.unsized.update(outs)
        args, kwargs = encode_call(_substitute(node.args, env), _substitute(node.kwargs, env), source_of(node))
        if name.startswith("aten.embedding"):  # a dense gradient is the same, and can be sent, summed and averaged
            args, kwargs = _dense(args, kwargs, target)
        if name == "aten.masked_select.default" and _has_shape_of_mask(node):
            name, args = "aten.index.Tensor", (args[0], cast(Arg, (args[1],)))
        if name in _WITH_NUMBER and not isinstance(args[0], str):  # only the second argument may be a number
            name, args = _WITH_NUMBER[name], (args[1], args[0])
            if name == "aten.add.Tensor" and "alpha" in kwargs:  # which scales the tensor, now the first argument
                scaled, factor = f"{outs[0]}_scaled", kwargs.pop("alpha")
                self._append(Op("aten.mul.Tensor", (scaled,), (args[0], factor)), node, no_grad, no_autocast)
                self.flat.dtypes[scaled] = self.flat.dtypes[outs[0]]
                args = (f"%{scaled}", args[1])
            elif "alpha" in kwargs:
                args = (*args, kwargs.pop("alpha"))
        self._append(Op(name, outs, args, kwargs), node, no_grad, no_autocast)

    def _append(self, op: Op, node: Node, no_grad: bool, no_autocast: bool) -> None:
        self.flat.ops.append(Op(op.op, op.outs, op.args, op.kwargs, no_grad=no_grad, no_autocast=no_autocast))
        self.flat.sources.append(source_of(node))

    def _check_backward(self, name: str, node: Node) -> None:
        """Leave a backward pass to autograd if it uses an operation that it may not use."""
        if name == GRADIENT_OF:
            self.backward = cast(int, node.args[1])
        elif name in (CUSTOM_GRADIENT, HOOK, HOOKED):
            self.backward = None
        elif self.backward is not None and name.startswith("aten.") and name != "aten.sym_size.int":
            if name not in ALLOWED and functional_form(name) is None and "out" not in node.kwargs:
                raise UntracedBackward(
                    self.backward, f"it calls {name}, which is not on the list of allowed operations"
                )
            if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
                raise UntracedBackward(self.backward, f"it draws random numbers by {name}")

    def _num_elements(self, node: Node, env: dict[Node, Any], prefix: str) -> None:
        """The number of elements of a tensor, as the product of its sizes."""
        tensor, source, total, first = _substitute(node.args[0], env), source_of(node), "", len(self.flat.ops)
        for dim in range(node.args[0].meta["val"].dim()):  # type: ignore[union-attr]
            size = f"{prefix}{node.name}.size{dim}"
            self.flat.ops.append(Op("aten.sym_size.int", (size,), (str(tensor), dim)))
            self.flat.sources.append(source)
            if total:
                product = f"{prefix}{node.name}.product{dim}"
                self.flat.ops.append(Op("sym.mul", (product,), ("%" + total, "%" + size)))
                self.flat.sources.append(source)
                size = product
            total = size
        if str(tensor)[1:] in self.flat.unsized:
            self.flat.unsized.update(name for op in self.flat.ops[first:] for name in op.outs)
        env[node] = Ref("%" + total) if total else 1

    def _call_and_copy(
        self, node: Node, name: str, env: dict[Node, Any], prefix: str, no_grad: bool, no_autocast: bool
    ) -> None:
        """An op that writes its result to `out`: the op itself, and a copy."""
        source, result, fresh = source_of(node), prefix + node.name, f"{prefix}{node.name}.value"
        others = {key: arg for key, arg in node.kwargs.items() if key != "out"}
        args, kwargs = encode_call(_substitute(node.args, env), _substitute(others, env), source)
        target = _substitute(node.kwargs["out"], env)
        self.flat.ops.append(Op(name, (fresh,), args, kwargs, no_grad=no_grad, no_autocast=no_autocast))
        self.flat.ops.append(Op("aten.copy_.default", (result,), (str(target), "%" + fresh), no_grad=no_grad))
        self.flat.dtypes[fresh] = self.flat.dtypes[result] = dtype_name(node.meta["val"].dtype)
        self.flat.sources += [source, source]
        env[node] = Ref("%" + result)

    def _inline(self, node: Node, env: dict[Node, Any], prefix: str, no_grad: bool, no_autocast: bool) -> Any:
        name = str(node.target)
        if name == "wrap_with_set_grad_enabled":
            enabled, inner, *rest = node.args
            no_grad = no_grad or not enabled
        elif name == "wrap_with_autocast":
            _, _, enabled, _, inner, *rest = node.args
            if enabled:
                raise TraceError(
                    f"{source_of(node)} enters torch.autocast; remove it and use Ravnest's own bf16 option"
                )
            no_autocast = True
        else:
            raise UnsupportedOp(
                f"{source_of(node)} uses {name}, which cannot be written as data; "
                "write it with ordinary tensor operations (torch.where for a branch, a Python loop for a scan)"
            )
        module = env[inner]  # type: ignore[index]
        placeholders = module.graph.find_nodes(op="placeholder")
        inner_env = {p: _substitute(v, env) for p, v in zip(placeholders, rest, strict=True)}
        return self.region(module, inner_env, f"{prefix}{node.name}.", no_grad=no_grad, no_autocast=no_autocast)


def _has_shape_of_mask(node: Node) -> bool:
    """Whether a call is `masked_select` with a mask of the tensor's own shape, which is an index."""
    if node.target is not torch.ops.aten.masked_select.default:
        return False
    tensor, mask = (cast(Node, arg).meta["val"] for arg in node.args)
    return len(tensor.shape) == len(mask.shape) and all(
        str(a) == str(b) for a, b in zip(tensor.shape, mask.shape, strict=True)
    )


def _dense(args: tuple[Arg, ...], kwargs: dict[str, Arg], target: Any) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """The arguments with `sparse=False`."""
    names = [a.name for a in target._schema.arguments]
    dense = tuple(False if name == "sparse" else arg for name, arg in zip(names, args, strict=False))
    return dense, {key: False if key == "sparse" else arg for key, arg in kwargs.items()}


def _substitute(item: Any, env: Mapping[Node, Any]) -> Any:
    """Replace nodes by their values, at any depth of nesting."""
    if isinstance(item, Node):
        return env[item]
    if isinstance(item, list | tuple):
        return tuple(_substitute(i, env) for i in item)
    if isinstance(item, dict):
        return {k: _substitute(v, env) for k, v in item.items()}
    return item


def _outs(node: Node, prefix: str) -> tuple[tuple[str, ...], Any]:
    """Names for an op's results; of a tuple only those that are used."""
    name = prefix + node.name
    value = node.meta["val"]
    if not isinstance(value, list | tuple):
        return (name,), Ref("%" + name)
    used = {user.args[1] for user in node.users if user.target is operator.getitem}
    whole = any(user.target is not operator.getitem for user in node.users)
    outs = tuple(f"{name}.{i}" if whole or i in used else "" for i in range(len(value)))
    return outs, tuple(Ref("%" + out) if out else None for out in outs)


def op_name(target: Any) -> str:
    """The name of an op in a program."""
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
        return _RENAMED.get(name, name)
    if target in _PYTHON:
        return _PYTHON[target]
    if getattr(target, "__name__", "") == "_sym_sqrt":
        return "sym.sqrt"
    return f"python.{getattr(target, '__name__', target)}"


def without_out(target: Any) -> str:
    """The name of the same op without its argument `out`."""
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if not a.is_out]
    packet = target.overloadpacket
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in candidate._schema.arguments] == wanted:
            return op_name(candidate)
    return ""


def _only_checked(graph: torch.fx.Graph) -> set[Node]:
    """Values that nothing reads but assertions, as in `assert lengths.max().item() <= limit` and passed checks."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        is_checked = all(user in found or op_name(user.target) in _DROPPED for user in node.users)
        if node.op == "call_function" and is_checked and _is_pure(node.target):
            found.add(node)
    return found


def _is_pure(target: Any) -> bool:
    """Whether a call has no effect but its result: it neither writes nor draws random numbers."""
    if isinstance(target, torch._ops.OpOverload):
        return (
            target.namespace == "aten"
            and not target._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in target.tags
        )
    return getattr(target, "__module__", "") == "_operator" or op_name(target).startswith(("sym.", "python.sym_"))


def _check_in_place(name: str, node: Node) -> None:
    """Reject an op that is not allowed, unless it is the in-place form of one that is."""
    if functional_form(name) is not None:
        return
    if name == "aten.embedding_renorm_.default":
        raise TraceError(
            f"{source_of(node)} uses an embedding with max_norm, which changes its weights in the forward pass: only "
            "the optimizer may change parameters. Scale the result of the embedding instead, for example with renorm"
        )
    source = source_of(node)
    if isinstance(node.target, torch._ops.OpOverload) and (advice := _of_values(node.target)):
        raise UnsupportedOp(f"{source} calls {name}, {advice}. {another_configuration(source)}".rstrip(". ") + ".")
    if name.startswith("python."):
        raise UnsupportedOp(
            f"{source} uses a transform of torch.func ({name.removeprefix('python.')}), which cannot be written as "
            "data: write the batch dimension, or the derivative, out with ordinary tensor operations"
        )
    remedy = another_configuration(source) or "Rewrite it with allowed operations"
    raise UnsupportedOp(
        f"{source} calls {name}, which is not on the list of allowed operations "
        f"({len(ALLOWED)} operations in {len(FAMILIES)} families, ravnest/graph/ops.py). {remedy}, or propose the "
        "operation: CONTRIBUTING.md, 'A new operation'"
    )


def _of_values(target: torch._ops.OpOverload) -> str:
    """Advice for an operation that no stage may have, because it gives a number or a size that depends on values."""
    if torch.Tag.dynamic_output_shape in target.tags or target is torch.ops.aten.where.default:
        return (
            "whose result has a size that depends on values; select with a mask instead, such as x[mask], compute "
            "every row and weight it by the mask, or use topk with a fixed number"
        )
    if torch.Tag.data_dependent_output in target.tags:
        return "which reads a number from a tensor, as .item(), float() and .tolist() do; keep it a tensor"
    return ""


def source_of(node: Node) -> str:
    """The innermost line outside torch that made this node: `file.py:12 in forward: x = ...`."""
    frames = _LINE.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return "the model"
    own = [frame for frame in frames if not IN_TORCH.search(frame[0]) and not frame[0].startswith("<eval_with_key>")]
    path, line, function, code = (own or frames)[-1]
    if path.endswith("ravnest/graph/tracer.py"):
        return "the loss function"
    return f"{path}:{line} in {function}: {code.strip()}"


def encode_call(args: Any, kwargs: Mapping[str, Any], source: str) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """Encode the arguments of a call as data. Layout, pinning and generator are left to the interpreter."""
    kept = {k: v for k, v in kwargs.items() if k not in ("layout", "pin_memory", "generator") and v is not None}
    return tuple(_encode(a, source) for a in args), {k: _encode(v, source) for k, v in kept.items()}


def _encode(item: Any, source: str) -> Any:
    if item is None or isinstance(item, bool | int):
        return item
    if isinstance(item, float):
        if math.isnan(item):
            raise TraceError(f"{source} uses a NaN constant, which is not allowed in a stage")
        return item if math.isfinite(item) else ("#inf" if item > 0 else "#-inf")
    if isinstance(item, str):
        return str(item) if isinstance(item, Ref) else "=" + item
    if isinstance(item, list | tuple):
        return tuple(_encode(i, source) for i in item)
    if isinstance(item, torch.dtype):
        return "$" + dtype_name(item)
    if isinstance(item, torch.device):
        return "@"
    if isinstance(item, torch.memory_format):
        return _FORMATS[item]
    if isinstance(item, torch.layout) and item is torch.strided:
        return None
    raise TraceError(f"{source} passes a {type(item).__name__} to an operation, which cannot be written as data")
