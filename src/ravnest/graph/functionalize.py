"""Functionalization: in-place calls become functional ones where that gives the same results.

relu_(x)            ->  y = relu(x), and later reads of x read y
x[:, 0].mul_(2)     ->  kept: another alias of the memory is read later, so the ops from the one that allocated
                        the memory to the last write form an atomic range, which no cut may split
count.add_(1)       ->  kept: a buffer of the model, written by the stage that owns it

An input of the model that is written in place is copied first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ravnest.errors import TraceError
from ravnest.graph.export import FlatGraph
from ravnest.graph.gradient_recorder import CUSTOM_GRADIENT
from ravnest.graph.ops import ALLOWED, functional_form, is_random, schema_of, writes_statistics
from ravnest.graph.program import Op, map_refs, refs

__all__ = ["FunctionalGraph", "functionalize", "written_value"]

_FOREVER = 1 << 60


@dataclass
class FunctionalGraph:
    """Ops without needless writes, the ranges that must stay in one stage, and the state that is written."""

    ops: list[Op] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    atomic_ranges: list[tuple[int, int]] = field(default_factory=list)
    mutated: set[str] = field(default_factory=set)


def functionalize(flat: FlatGraph, parameters: set[str]) -> FunctionalGraph:
    """Functionalize `flat`; `parameters` are the names of values that must not be written."""
    first = _Functionalizer(flat, parameters)
    result = first.run()
    if first.written_inputs:  # again, with copies of them: a batch may be used several times
        result = _Functionalizer(_with_copies(flat, first.written_inputs), parameters).run()
    return result


def _with_copies(flat: FlatGraph, inputs: Sequence[str]) -> FlatGraph:
    """The graph with copies of some inputs, which it may write to."""
    names = {name: f"{name}.copy" for name in inputs}
    copies = [Op("aten.clone.default", (copy,), ("%" + name,)) for name, copy in names.items()]
    return replace(
        flat,
        ops=[*copies, *(map_refs(op, lambda name: names.get(name, name)) for op in flat.ops)],
        sources=[*("a copy of the model's input" for _ in copies), *flat.sources],
        outputs=[names.get(name, name) for name in flat.outputs],
        dtypes={**flat.dtypes, **{copy: flat.dtypes[name] for name, copy in names.items()}},
    )


class _Functionalizer:
    def __init__(self, flat: FlatGraph, parameters: set[str]) -> None:
        self.flat = flat
        self.parameters = parameters
        self.result = FunctionalGraph()
        self.renamed: dict[str, str] = {}  # original name -> its current value
        self.root: dict[str, str] = {}  # value -> the value that allocated its memory
        self.allocated_at: dict[str, int] = {}  # root -> index of the op that allocated it
        self.aliases: defaultdict[str, set[str]] = defaultdict(set)  # root -> original names of that memory
        self.last_read = {name: i for i, op in enumerate(flat.ops) for name in refs(op)}
        self.last_read.update(dict.fromkeys(flat.outputs, _FOREVER))
        self.written_inputs: list[str] = []

    def run(self) -> FunctionalGraph:
        for name in (*self.flat.inputs, *self.flat.state):
            self._allocate(name, allocated_at=0)
        for i, (op, source) in enumerate(zip(self.flat.ops, self.flat.sources, strict=True)):
            written = written_value(op)
            if written is None:
                self._emit(self._with_current_names(op), source)
            else:
                self._write(i, op, written, source)
        self.result.outputs = [self._current(name) for name in self.flat.outputs]
        return self.result

    def _current(self, name: str) -> str:
        while name in self.renamed:
            name = self.renamed[name]
        return name

    def _with_current_names(self, op: Op) -> Op:
        return map_refs(op, self._current)

    def _allocate(self, name: str, allocated_at: int) -> None:
        self.root[name] = name
        self.allocated_at[name] = allocated_at
        self.aliases[name].add(name)

    def _emit(self, op: Op, source: str) -> None:
        """Append an op that writes at most running statistics, and record the aliases of its results."""
        for out, shared in zip(op.outs, _aliased(op), strict=True):
            if not out:
                continue
            if shared is None:
                self._allocate(out, allocated_at=len(self.result.ops))
            else:
                self.root[out] = self.root[shared]
                self.aliases[self.root[out]].add(out)
        if writes_statistics(op.op):
            self.result.mutated.update(a[1:] for a in op.args[3:5] if isinstance(a, str))
        self.result.ops.append(op)
        self.result.sources.append(source)

    def _write(self, i: int, op: Op, original: str, source: str) -> None:
        target = self._current(original)
        root = self.root[target]
        if root in self.parameters:
            raise TraceError(
                f"{source} writes to a parameter in the forward pass: only the optimizer may change parameters"
            )
        functional = _functional_form(op)
        alias_read_later = any(
            self.last_read.get(name, -1) > i
            for name in self.aliases[root]
            if name not in (original, op.outs[0]) and self._current(name) != target
        )
        if functional and root not in self.flat.state and not alias_read_later and self._same_dtype(op, original):
            self._emit(self._with_current_names(functional), source)
            self.renamed[original] = op.outs[0]
            return
        self._keep(op, functional, target, source)

    def _keep(self, op: Op, functional: Op | None, target: str, source: str) -> None:
        """Keep the write: as the op itself if it is allowed, else as its functional form and a copy."""
        root = self.root[target]
        kept = self._with_current_names(op)
        if op.op not in ALLOWED:
            assert functional is not None
            fresh = f"{op.outs[0]}.new"
            self._emit(map_refs(Op(functional.op, (fresh,), functional.args, functional.kwargs), self._current), source)
            kept = Op("aten.copy_.default", op.outs, ("%" + target, "%" + fresh), no_grad=op.no_grad)
        self.root[op.outs[0]] = root
        self.aliases[root].add(op.outs[0])
        if root in self.flat.inputs and root not in self.written_inputs:
            self.written_inputs.append(root)
        if root in self.flat.state:
            self.result.mutated.add(root)
        else:
            self.result.atomic_ranges.append((self.allocated_at[root], len(self.result.ops)))
        self.result.ops.append(kept)
        self.result.sources.append(source)

    def _same_dtype(self, op: Op, target: str) -> bool:
        """Whether the functional form gives the dtype that the in-place form keeps."""
        dtype = self.flat.dtypes.get(target)
        return all(self.flat.dtypes.get(name, dtype) == dtype for name in refs(op) if name != target)


def written_value(op: Op) -> str | None:
    """The value that an in-place op writes to."""
    parts = op.op.split(".")
    if parts[0] != "aten" or not parts[1].endswith("_") or parts[1].endswith("__"):
        return None
    target = op.args[0]
    assert isinstance(target, str)
    return target[1:]


def _functional_form(op: Op) -> Op | None:
    """The functional form of an in-place op, if a stage may use it."""
    functional = functional_form(op.op)
    if functional is None:
        return None
    return Op(functional, op.outs, op.args, op.kwargs, no_grad=op.no_grad, no_autocast=op.no_autocast)


def _aliased(op: Op) -> Sequence[str | None]:
    """For each result of an op the value whose memory it may alias."""
    if op.op == CUSTOM_GRADIENT:
        outputs = op.args[0]
        assert isinstance(outputs, tuple)
        return [str(output)[1:] for output in outputs]
    if ALLOWED.get(op.op) in ("views", "conversions", "joining"):
        for declared, arg in zip(schema_of(op.op).arguments, op.args, strict=False):
            if declared.alias_info is not None and isinstance(arg, str):
                return [arg[1:]] * len(op.outs)
    return [None] * len(op.outs)


def drop_unused(result: FunctionalGraph) -> FunctionalGraph:
    """Remove ops whose results are never read. Random draws and writes stay."""
    needed = set(result.outputs)
    kept: list[int] = []
    for i in range(len(result.ops) - 1, -1, -1):
        op = result.ops[i]
        has_effect = is_random(op.op) or writes_statistics(op.op) or ALLOWED.get(op.op) == "writes"
        if has_effect or needed.intersection(op.outs):
            needed.update(refs(op))
            kept.append(i)
    kept.reverse()
    new_index = {old: new for new, old in enumerate(kept)}
    following = _next_kept(new_index, len(result.ops))
    return FunctionalGraph(
        ops=[result.ops[i] for i in kept],
        sources=[result.sources[i] for i in kept],
        outputs=result.outputs,
        atomic_ranges=[(following[a], new_index[b]) for a, b in result.atomic_ranges],
        mutated=result.mutated,
    )


def _next_kept(new_index: dict[int, int], count: int) -> list[int]:
    """For each old index, the new index of the first kept op from there on."""
    following = [len(new_index)] * (count + 1)
    for i in range(count - 1, -1, -1):
        following[i] = new_index.get(i, following[i + 1])
    return following
