"""Records a model's initialization as data.

The builder runs under fake tensors while every operation is recorded. A slice of that record makes the tensors of one
stage; random numbers that belong to other tensors become `Draw`s, so that the generator stays in step and each stage
gets exactly the bits that the whole model would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ravnest.errors import TraceError
from ravnest.graph.data_checks import passing_checks
from ravnest.graph.export import Ref, encode_call, op_name, without_out
from ravnest.graph.lazy import uninitialised_outside_modes
from ravnest.graph.ops import ALLOWED, INIT_ALLOWED, LITERAL, LITERAL_LIMIT, TRUNC_NORMAL, functional_form, is_random
from ravnest.graph.program import Draw, Init, Op, dtype_name, map_refs, refs, storage_id
from ravnest.graph.weights import replay

__all__ = ["InitLog", "record", "recording"]

_SAME = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")
_READS = (
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.allclose.default,
)  # fmt: skip
_EYES = {torch.ops.aten.eye.out: "aten.eye.default", torch.ops.aten.eye.m_out: "aten.eye.m"}
_DRAWN_LIMIT = 1 << 24  # elements of a tensor that is drawn to answer a question
_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # storage, offset, shape, strides


@dataclass
class _Step:
    op: Op
    written: tuple[int, ...]  # storages the op makes or changes
    read: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    is_private: bool = False  # draws from a generator of the builder's own, not from torch's


@dataclass
class InitLog:
    """All operations of a builder, in order. A tensor is identified by its storage, offset, shape and strides."""

    steps: list[_Step] = field(default_factory=list)
    names: dict[_Key, str] = field(default_factory=dict)
    literals: dict[str, Tensor] = field(default_factory=dict)
    alive: list[Tensor] = field(default_factory=list)  # keeps storage addresses unique

    def name(self, tensor: Tensor) -> str:
        self.alive.append(tensor)
        return self.names.setdefault(_key(tensor), f"i{len(self.names)}")

    def literal(self, tensor: Tensor, fake: Tensor) -> None:
        """Record a tensor literal in the builder's code, such as `torch.tensor([1, 2])`."""
        if tensor.numel() > LITERAL_LIMIT:
            raise TraceError(
                f"the builder uses a tensor literal of {tensor.numel()} elements, at most {LITERAL_LIMIT} are allowed; "
                "make it with torch operations, or pass the model itself instead of a builder"
            )
        name = self.name(fake)
        self.literals[name] = tensor
        self._append(Op(LITERAL, (name,)), fake, [], [fake])

    def constant(self, tensor: Tensor) -> None:
        """Record a tensor that the builder did not make, if its values are known."""
        if _key(tensor) not in self.names:
            value = tensor.constant if isinstance(tensor, FakeTensor) else tensor
            if value is not None:
                self.literal(value, tensor)

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        outs = result if isinstance(result, list | tuple) else (result,)
        if not any(isinstance(o, Tensor) for o in outs):
            return  # a query, such as a tensor's device
        if "out" in kwargs:
            self._call_and_copy(func, args, kwargs)
            return
        reads = list(_tensors((args, kwargs)))
        changed = [args[0]] if func._schema.is_mutable else []
        name = op_name(func)
        if name == "aten.set_.source_Tensor":
            return  # the tensor has the memory of the other now, and with it its name
        if name in _SAME:
            self.names[_key(outs[0])] = self.name(reads[0])
            return
        if not changed and all(isinstance(o, Tensor) and _key(o) in self.names for o in outs):
            return  # an identical view again
        coded_args, coded_kwargs = encode_call(_named(args, self), _named(kwargs, self), "the builder")
        name, coded_args, coded_kwargs = _public_form(name, coded_args, coded_kwargs)
        produced = [o for o in outs if isinstance(o, Tensor)]
        out_names = ("",) * len(outs) if changed else tuple(self.name(o) for o in produced)
        self._append(Op(name, out_names, coded_args, coded_kwargs), outs[0], reads, [*changed, *produced])
        self.steps[-1].is_private = any(isinstance(arg, torch.Generator) for arg in (*args, *kwargs.values()))

    def _call_and_copy(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Record an op that writes its result to `out`: as the op itself, and a copy."""
        out, others = kwargs["out"], {key: arg for key, arg in kwargs.items() if key != "out"}
        fresh, name = self.names.setdefault((0, len(self.steps), (), ()), f"i{len(self.names)}"), without_out(func)
        if func in _EYES:  # torch declares its form without `out` with a dtype
            name, others = _EYES[func], {**others, "dtype": out.dtype}
        coded_args, coded_kwargs = encode_call(_named(args, self), _named(others, self), "the builder")
        self._append(Op(name, (fresh,), coded_args, coded_kwargs), out, list(_tensors((args, others))), [out])
        copy = Op("aten.copy_.default", ("",), ("%" + self.name(out), "%" + fresh))
        self._append(copy, out, [out], [out])

    def view_in_place(self, name: str, before: str, args: Any, result: Tensor) -> None:
        """Record an op that changes the shape of a tensor in place, such as `t_`, as a view of the tensor before."""
        coded, _ = encode_call(args[1:], {}, "the builder")
        self._append(Op(name, (self.name(result),), ("%" + before, *coded)), result, [result], [result])

    def special(self, op: Op, tensor: Tensor) -> None:
        """Record an op of Ravnest's own that writes to a tensor."""
        self._append(op, tensor, [tensor], [tensor])

    def _append(self, op: Op, first: Any, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        shape = tuple(first.shape) if isinstance(first, Tensor) else ()
        dtype = dtype_name(first.dtype) if isinstance(first, Tensor) else ""
        self.steps.append(_Step(op, tuple(map(storage_id, writes)), tuple(map(storage_id, reads)), shape, dtype))

    def init_for(self, targets: Mapping[str, Tensor]) -> Init:
        """The init list that makes exactly `targets` (name in the model -> tensor)."""
        return self._init(targets, {}, self._slice(targets.values(), set()), [True] * len(self.steps))

    def init_beside(
        self, loaded: Mapping[str, Tensor], targets: Mapping[str, Tensor], others: Mapping[str, Tensor]
    ) -> Init:
        """The init list that makes `targets` in a model whose `loaded` tensors come from files.

        It reads these instead of making them. Random numbers are drawn for `targets` and `others`, all tensors that do
        not come from files, as if the others had been loaded when the model was built.
        """
        storages = {storage_id(t) for t in loaded.values()}
        replaced = self._slice(loaded.values(), set())
        for name, tensor in targets.items():
            if any(
                own and other and is_random(step.op.op)
                for step, own, other in zip(self.steps, self._slice([tensor], storages), replaced, strict=True)
            ):
                raise TraceError(
                    f"the builder computes {name} from initial values in another dtype than that of the parameters "
                    "that the pretrained weights replace: give the model its dtype before it computes with its "
                    "weights, or pass the model itself instead of a builder"
                )
        chosen = self._slice(targets.values(), storages)
        return self._init(targets, loaded, chosen, self._slice(others.values(), storages))

    def _init(
        self,
        targets: Mapping[str, Tensor],
        loaded: Mapping[str, Tensor],
        chosen: Sequence[bool],
        drawn: Sequence[bool],
    ) -> Init:
        """The init list of the chosen steps; random numbers of the others are drawn where `drawn` says so."""
        self._check_recorded(targets)
        rename: dict[str, str] = {}
        copies: list[Op] = []  # of targets that share their memory with another
        for name, tensor in loaded.items():
            if (recorded := self.names.get(_key(tensor))) is not None:
                rename.setdefault(recorded, name)
        for name, tensor in targets.items():
            first = rename.setdefault(self.names[_key(tensor)], name)
            if first != name:
                copies.append(Op("aten.clone.default", (name,), ("%" + first,)))
        ops: list[Op] = []
        draws: list[Draw] = []
        for step, is_chosen, is_drawn in zip(self.steps, chosen, drawn, strict=True):
            if is_chosen:
                self._check_generator(step, targets)
                ops.append(_checked(_rename(self._with_literal(step.op), rename)))
            elif is_drawn and is_random(step.op.op) and not step.is_private:
                draws.append(_draw(step, len(ops)))
        last = max((i for i, op in enumerate(ops) if is_random(op.op)), default=-1)
        return Init((*ops, *copies), tuple(d for d in draws if d.at <= last))

    def _slice(self, targets: Iterable[Tensor], loaded: set[int]) -> list[bool]:
        """Whether each step is needed to make `targets`; of steps on `loaded` storages, only views are."""
        needed = {storage_id(t) for t in targets}
        chosen = [False] * len(self.steps)
        for i in range(len(self.steps) - 1, -1, -1):
            step = self.steps[i]
            if needed.intersection(step.written):
                of_loaded = loaded.intersection(step.written)
                if of_loaded and not (any(step.op.outs) and of_loaded.intersection(step.read)):
                    continue
                needed.update(step.read)
                chosen[i] = True
        return chosen

    def value_of(self, tensor: Tensor, *, drawn: bool = False) -> Tensor | None:
        """The values of a small tensor that depends on no random numbers, such as `torch.linspace(0, 1, 12)`.

        With `drawn`, random numbers of some seed are used: for a question that every seed answers alike.
        """
        if _key(tensor) not in self.names:
            return None
        try:
            init = self.init_for({"value": tensor})
        except TraceError:
            return None
        chosen = zip(self.steps, self._slice([tensor], set()), strict=True)
        limit = _DRAWN_LIMIT if drawn else LITERAL_LIMIT
        if any(prod(s.shape) > limit or (is_random(s.op.op) and not drawn) for s, is_chosen in chosen if is_chosen):
            return None
        with _disable_current_modes():
            return replay(init, {"value"}, 0)["value"]

    def _with_literal(self, op: Op) -> Op:
        """Fill in the numbers of a literal; other ops stay as they are."""
        if op.op != LITERAL:
            return op
        tensor = self.literals[op.outs[0]]
        call = (tensor.flatten().tolist(), tensor.dtype, tuple(tensor.shape))
        return Op(LITERAL, op.outs, encode_call(call, {}, "the builder")[0])

    def _check_generator(self, step: _Step, targets: Mapping[str, Tensor]) -> None:
        if step.is_private:
            name = next((n for n, t in targets.items() if storage_id(t) in step.written), min(targets))
            raise TraceError(
                f"the builder draws {name} from a torch.Generator of its own, outside torch's generator; draw it after "
                "torch.manual_seed without a generator, or pass the model itself instead of a builder"
            )

    def _check_recorded(self, targets: Mapping[str, Tensor]) -> None:
        for name, tensor in targets.items():
            if _key(tensor) not in self.names:
                raise TraceError(
                    f"{name} was not made by torch operations inside the builder; "
                    "make it there, or pass the model itself instead of a builder"
                )


@contextmanager
def _recorded_trunc_normal(log: InitLog) -> Iterator[None]:
    """Record calls of `trunc_normal_`: its rejection loop depends on values, which fake tensors do not have."""
    original = torch.nn.init._no_grad_trunc_normal_

    def recorded(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        args = (Ref("%" + log.name(tensor)), float(mean), float(std), float(a), float(b))
        log.special(Op(TRUNC_NORMAL, ("",), encode_call(args, {}, "the builder")[0]), tensor)
        log.steps[-1].is_private = generator is not None
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = recorded
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


@contextmanager
def _replaced_parameters() -> Iterator[None]:
    """Convert modules by new parameters: torch would swap their contents, which it cannot do with recorded tensors."""
    original = nn.Module._apply
    converted: dict[Tensor, Tensor] = {}  # so that tied parameters stay tied

    def convert(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if tensor not in converted:
            with torch.no_grad():
                result = function(tensor)
            if result is not tensor and isinstance(tensor, nn.Parameter):
                result = nn.Parameter(result, requires_grad=tensor.requires_grad and result.is_floating_point())
            converted[tensor] = result
            converted[result] = result
        return converted[tensor]

    def apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        converted.clear()
        for part in module.modules() if recurse else (module,):
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = convert(tensor, function)  # type: ignore[assignment]
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, log: InitLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and (values := self._values(func, args)) is not None:
            with _disable_current_modes():
                return func(*values, **(kwargs or {}))
        view = functional_form(op_name(func))
        if view is not None and ALLOWED[view] == "views":
            before = self.log.name(args[0])
            result = func(*args, **(kwargs or {}))
            self.log.view_in_place(view, before, args, result)
            return result
        result = func(*args, **(kwargs or {}))
        for given in _tensors((args, kwargs or {})):
            if not isinstance(given, FakeTensor) and isinstance(result, Tensor):
                self.log.literal(given, result)
                return result
        self.log.call(func, args, kwargs or {}, result)
        return result

    def _values(self, func: Any, args: Any) -> list[Any] | None:
        """The arguments with the values of their tensors, if all are known.

        A builder that asks a yes-or-no question about random weights, such as whether they are orthogonal, does not
        expect another answer for another seed; if there is one, the model's own initial weights differ (`verify`).
        """
        is_question = func is not _READS[0] or args[0].dtype == torch.bool
        found = [self.log.value_of(a, drawn=is_question) if isinstance(a, FakeTensor) else a for a in args]
        return None if any(a is None for a in found) else found


@contextmanager
def recording(log: InitLog, fake: FakeTensorMode) -> Iterator[None]:
    """Record the operations on fake tensors."""
    with fake, _Recorder(log), _recorded_trunc_normal(log):
        yield


def record(builder: Callable[[], nn.Module], fake: FakeTensorMode) -> tuple[nn.Module, InitLog]:
    """Build the model without memory for its weights; return it and the record of its initialization."""
    log = InitLog()
    try:
        with recording(log, fake), uninitialised_outside_modes(), _replaced_parameters(), passing_checks():
            module = builder()
    except TraceError:
        raise
    except Exception as error:  # any exception here is raised by the user's builder
        raise TraceError(
            f"the builder failed on fake tensors: {type(error).__name__}: {str(error)[:400]}\n"
            "Do not read values of tensors while building, or pass the model itself instead of a builder."
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"the builder returned a {type(module).__name__}, not a torch.nn.Module")
    return module, log


def _key(tensor: Tensor) -> _Key:
    return storage_id(tensor), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _tensors(item: Any) -> Iterable[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part)
    elif isinstance(item, Mapping):
        yield from _tensors(list(item.values()))


def _named(item: Any, log: InitLog) -> Any:
    if isinstance(item, Tensor):
        return Ref("%" + log.name(item))
    if isinstance(item, list | tuple):
        return tuple(_named(part, log) for part in item)
    if isinstance(item, Mapping):
        return {key: _named(part, log) for key, part in item.items()}
    return item


def _public_form(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Replace ops that torch dispatches under a private name by their public form."""
    if name == "aten._to_copy.default":
        dtype = kwargs.get("dtype")
        return ("aten.to.dtype", (*args, dtype), {}) if dtype else ("aten.clone.default", args, {})
    return name, args, kwargs


def _rename(op: Op, names: Mapping[str, str]) -> Op:
    renamed = map_refs(op, lambda name: names.get(name, name))
    return Op(renamed.op, tuple(names.get(o, o) for o in op.outs), renamed.args, renamed.kwargs)


def _checked(op: Op) -> Op:
    if op.op not in (LITERAL, TRUNC_NORMAL) and op.op not in INIT_ALLOWED:
        raise TraceError(
            f"the builder initialises a tensor with {op.op}, which is not on the list of allowed operations; "
            "use other torch operations, or pass the model itself instead of a builder"
        )
    return op


_FILLS = {"aten.rand_like.default": "aten.uniform_.default", "aten.randn_like.default": "aten.normal_.default"}


def _draw(step: _Step, at: int) -> Draw:
    if step.op.op in _FILLS:  # the same numbers as a fill of a tensor of that shape
        return Draw(at, _FILLS[step.op.op], step.dtype, step.shape, ())
    in_place = step.op.op.split(".")[1].endswith("_")
    if len(list(refs(step.op))) > in_place:
        raise TraceError(
            f"the builder draws random numbers with {step.op.op} from other tensors; pass the model itself instead"
        )
    args = step.op.args[1:] if in_place else step.op.args
    return Draw(at, step.op.op, step.dtype, step.shape, args)
