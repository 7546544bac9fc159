"""In-place calls become functional ones, or are pinned where they cannot.

relu_(x)            ->  y = relu(x), and whoever read x later reads y
x[:, 0].mul_(2)     ->  kept: another name of the same memory is read later, so the ops from the one that
                        made the memory to the last write form an island that no cut may split
count.add_(1)       ->  kept: a buffer of the model's own, written by the stage that owns it
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ..core.errors import TraceError
from .export import Flat
from .ops import ALLOWED, SYM, is_random, schema_of, writes_statistics
from .program import Op, map_refs, refs

__all__ = ["Functional", "functionalise"]

_FOREVER = 1 << 60


@dataclass
class Functional:
    """The result: ops without needless writes, what must stay together, which state is written."""

    ops: list[Op] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    islands: list[tuple[int, int]] = field(default_factory=list)
    mutated: set[str] = field(default_factory=set)


def functionalise(flat: Flat, parameters: set[str]) -> Functional:
    """Rewrite `flat`; `parameters` are the names of values that must not be written at all."""
    return _Rewrite(flat, parameters).run()


class _Rewrite:
    def __init__(self, flat: Flat, parameters: set[str]) -> None:
        self.flat = flat
        self.parameters = parameters
        self.result = Functional()
        self.now: dict[str, str] = {}  # original name -> the value it stands for now
        self.root: dict[str, str] = {}  # value -> the value whose memory it shares
        self.made_at: dict[str, int] = {}  # root -> index of the op that made it
        self.sharing: defaultdict[str, set[str]] = defaultdict(set)  # root -> original names on that memory
        self.last_read = {name: i for i, op in enumerate(flat.ops) for name in refs(op)}
        self.last_read.update(dict.fromkeys(flat.outputs, _FOREVER))

    def run(self) -> Functional:
        for name in (*self.flat.inputs, *self.flat.state):
            self._own_memory(name, made_at=0)
        for i, (op, source) in enumerate(zip(self.flat.ops, self.flat.sources, strict=True)):
            written = _written(op)
            if written is None:
                self._emit(self._renamed(op), source)
            else:
                self._write(i, op, written, source)
        self.result.outputs = [self._current(name) for name in self.flat.outputs]
        return self.result

    def _current(self, name: str) -> str:
        while name in self.now:
            name = self.now[name]
        return name

    def _renamed(self, op: Op) -> Op:
        return map_refs(op, self._current)

    def _own_memory(self, name: str, made_at: int) -> None:
        self.root[name] = name
        self.made_at[name] = made_at
        self.sharing[name].add(name)

    def _emit(self, op: Op, source: str) -> None:
        """Append an op that writes nothing but perhaps running statistics; note whose memory its results share."""
        shared = _shared(op)
        for out in filter(None, op.outs):
            if shared is None:
                self._own_memory(out, made_at=len(self.result.ops))
            else:
                self.root[out] = self.root[shared]
                self.sharing[self.root[out]].add(out)
        if writes_statistics(op.op):
            self.result.mutated.update(a[1:] for a in op.args[3:5] if isinstance(a, str))
        self.result.ops.append(op)
        self.result.sources.append(source)

    def _write(self, i: int, op: Op, original: str, source: str) -> None:
        target = self._current(original)
        root = self.root[target]
        if root in self.parameters:
            raise TraceError(f"{source} writes to a parameter of the model in its forward pass; only the optimizer may")
        twin = _twin(op)
        others_read_later = any(
            self.last_read.get(name, -1) > i
            for name in self.sharing[root]
            if name not in (original, op.outs[0]) and self._current(name) != target
        )
        if twin and root not in self.flat.state and not others_read_later and self._same_dtype(op, original):
            self._emit(self._renamed(twin), source)
            self.now[original] = op.outs[0]
            return
        self._keep(op, twin, target, source)

    def _keep(self, op: Op, twin: Op | None, target: str, source: str) -> None:
        """Write in place: as the op itself where it is allowed, else as its twin and a copy."""
        root = self.root[target]
        kept = self._renamed(op)
        if op.op not in ALLOWED:
            assert twin is not None
            fresh = f"{op.outs[0]}.new"
            self._emit(map_refs(Op(twin.op, (fresh,), twin.args, twin.kwargs), self._current), source)
            kept = Op("aten.copy_.default", op.outs, ("%" + target, "%" + fresh), no_grad=op.no_grad)
        self.root[op.outs[0]] = root
        self.sharing[root].add(op.outs[0])
        if root in self.flat.state:
            self.result.mutated.add(root)
        else:
            self.result.islands.append((self.made_at[root], len(self.result.ops)))
        self.result.ops.append(kept)
        self.result.sources.append(source)

    def _same_dtype(self, op: Op, target: str) -> bool:
        """Whether the functional form gives the dtype that the in-place form keeps."""
        dtype = self.flat.dtypes.get(target)
        return all(self.flat.dtypes.get(name, dtype) == dtype for name in refs(op) if name != target)


def _written(op: Op) -> str | None:
    """The value an op writes to, if it is an in-place one."""
    parts = op.op.split(".")
    if parts[0] != "aten" or not parts[1].endswith("_") or parts[1].endswith("__"):
        return None
    target = op.args[0]
    assert isinstance(target, str)
    return target[1:]


def _twin(op: Op) -> Op | None:
    """The functional form of an in-place op, if a stage may use it."""
    _, name, overload = op.op.split(".")
    twin = f"aten.{name[:-1]}.{overload}"
    if twin not in ALLOWED:
        return None
    return Op(twin, op.outs, op.args, op.kwargs, no_grad=op.no_grad, no_autocast=op.no_autocast)


def _shared(op: Op) -> str | None:
    """The value whose memory the results of an op may share."""
    if op.op in SYM or op.op == "aten.sym_size.int":
        return None
    if ALLOWED[op.op] not in ("views", "conversions", "joining"):
        return None
    for declared, arg in zip(schema_of(op.op).arguments, op.args, strict=False):
        if declared.alias_info is not None and isinstance(arg, str):
            return arg[1:]
    return None


def drop_unused(result: Functional) -> Functional:
    """Leave out ops whose results nobody reads. Draws of random numbers and writes stay."""
    needed = set(result.outputs)
    kept: list[int] = []
    for i in range(len(result.ops) - 1, -1, -1):
        op = result.ops[i]
        stays = is_random(op.op) or writes_statistics(op.op) or ALLOWED.get(op.op) == "writes"
        if stays or needed.intersection(op.outs):
            needed.update(refs(op))
            kept.append(i)
    kept.reverse()
    place = {old: new for new, old in enumerate(kept)}
    following = _next_kept(place, len(result.ops))
    return Functional(
        ops=[result.ops[i] for i in kept],
        sources=[result.sources[i] for i in kept],
        outputs=result.outputs,
        islands=[(following[a], place[b]) for a, b in result.islands],
        mutated=result.mutated,
    )


def _next_kept(place: dict[int, int], count: int) -> list[int]:
    """For each old index, the new index of the first op kept from there on."""
    following = [len(place)] * (count + 1)
    for i in range(count - 1, -1, -1):
        following[i] = place.get(i, following[i + 1])
    return following
