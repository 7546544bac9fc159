"""Takes the backward passes of a model's own, which `gradient_recorder` recorded, out of its forward pass.

Everything between the placeholders of a backward pass and the marker at its end becomes the `BackwardPass` of one op,
and what it reads from elsewhere its saved values:

    y = round(x);  g = gradient_of(y);  m = mul(g, x);  z = custom_gradient([y], [x], [g], [m])
    ->  y = round(x);  z = with_gradient([y], [x], [x]; g, a -> m = mul(g, a))

A hook on a tensor changes its whole gradient, wherever it was registered: its op follows the op that makes the tensor,
and everything else reads the tensor through it. If the hook reads values that are made from the tensor, their ops are
repeated before it, without gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from ravnest.errors import TraceError
from ravnest.graph.functionalize import FunctionalGraph
from ravnest.graph.gradient_recorder import CUSTOM_GRADIENT, GRADIENT_OF, HOOK, HOOKED
from ravnest.graph.ops import ALLOWED, WITH_GRADIENT, is_random, may_share_memory, writes_statistics
from ravnest.graph.program import BackwardPass, Op, map_refs, refs

__all__ = ["extract_backward"]


@dataclass(eq=False)
class _Entry:
    """An op with its line in the model and its position in the given list (-1: a new op)."""

    op: Op
    source: str
    position: int
    is_inside: bool = False  # moved into a backward pass


def extract_backward(graph: FunctionalGraph) -> FunctionalGraph:
    """The graph without markers: each backward pass is part of the op that it belongs to."""
    if not any(op.op in (CUSTOM_GRADIENT, HOOK, HOOKED) for op in graph.ops):
        return graph
    return _Extractor(graph).run()


class _Extractor:
    def __init__(self, graph: FunctionalGraph) -> None:
        self.graph = graph
        self.entries = [_Entry(op, s, i) for i, (op, s) in enumerate(zip(graph.ops, graph.sources, strict=True))]
        self.hooked = {op.outs[0]: str(op.args[0])[1:] for op in graph.ops if op.op == HOOKED}
        self.outputs = list(graph.outputs)
        self.readers: defaultdict[str, list[_Entry]] = defaultdict(list)
        self.num_hooks = 0
        self._index(self.entries)

    def run(self) -> FunctionalGraph:
        for entry in [e for e in self.entries if e.op.op in (CUSTOM_GRADIENT, HOOK)]:
            self._extract(entry)
        self.entries = [e for e in self.entries if e.op.op not in (HOOKED, GRADIENT_OF)]
        new_position = {e.position: i for i, e in enumerate(self.entries)}
        ranges = [
            (min(new_position[p] for p in range(first, last + 1) if p in new_position), new_position[last])
            for first, last in self.graph.atomic_ranges
            if last in new_position
        ]
        return replace(
            self.graph,
            ops=[e.op for e in self.entries],
            sources=[e.source for e in self.entries],
            outputs=self.outputs,
            atomic_ranges=ranges,
        )

    def _index(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            for name in dict.fromkeys(refs(entry.op)):
                self.readers[name].append(entry)

    def _extract(self, marker: _Entry) -> None:
        """Replace one marker and its backward pass by an op."""
        end = self.entries.index(marker)
        values, *_ = lists = _lists(marker.op)
        index, results = marker.op.args[-1], lists[-1]
        places = [i for i, e in enumerate(self.entries[:end]) if e.op.op == GRADIENT_OF and e.op.args[1] == index]
        gradients = [self.entries[i].op.outs[0] for i in places][: len(lists[-2])]  # before writes to them
        start = places[0]
        window = self.entries[start:end]
        self._move_inside(window, gradients, results, marker)
        backward, saved = _backward_of([e.op for e in window if e.is_inside], gradients, results)
        rest = [e for e in window if not e.is_inside and e.op.op != GRADIENT_OF]
        if marker.op.op == HOOK:
            marker.is_inside = True
            self.entries[start : end + 1] = rest
            if backward.results != backward.gradients:
                self._insert_hook([self.hooked[name] for name in values], backward, saved, marker.source)
            return
        args = _refs(values), _refs(lists[1]), _refs(saved)
        marker.op = Op(WITH_GRADIENT, marker.op.outs, args, backward=backward)
        self.entries[start : end + 1] = [*rest, marker]
        self._index([marker])

    def _move_inside(
        self, window: Sequence[_Entry], gradients: Iterable[str], results: Iterable[str], marker: _Entry
    ) -> None:
        """Mark the entries of a backward pass; those that the forward pass reads too, such as sizes, stay outside."""
        candidates = [e for e in window if e.op.op != GRADIENT_OF]
        within = {*candidates, marker}
        dependent = set(gradients)
        for entry in candidates:
            if dependent.intersection(refs(entry.op)):
                dependent.update(filter(None, entry.op.outs))
        outside: set[_Entry] = set()
        for entry in reversed(candidates):
            outs = set(filter(None, entry.op.outs))
            readers = (r for name in outs for r in self.readers[name] if not r.is_inside)
            if outs.intersection(self.outputs) or any(r not in within or r in outside for r in readers):
                if dependent.intersection(outs):
                    raise TraceError(f"{entry.source}: a gradient is used in the forward pass")
                outside.add(entry)
        candidates = [e for e in candidates if e not in outside]
        _check_effects(candidates)
        needed = set(results)
        for entry in reversed(candidates):
            if ALLOWED.get(entry.op.op) == "writes" or needed.intersection(entry.op.outs):
                needed.update(refs(entry.op))
                entry.is_inside = True

    def _insert_hook(self, values: Sequence[str], backward: BackwardPass, saved: Sequence[str], source: str) -> None:
        """Put a hook after the ops that make its values, and let everything else read the values through it."""
        made = {out: i for i, e in enumerate(self.entries) for out in e.op.outs if out}
        makers = [made[name] for name in values if name in made and not self.entries[made[name]].op.no_grad]
        readers = (i for i, e in enumerate(self.entries) if e.op.op != HOOKED and values[0] in refs(e.op))
        at = max(makers) + 1 if makers else next(readers, None)  # a parameter has no maker
        if at is None:
            return  # nothing reads it
        copies, renamed = self._copies([*saved, *values], at, made, source)
        self.num_hooks += 1
        outs = tuple(f"{name}.hook{self.num_hooks}" for name in values)
        args = _refs([renamed.get(name, name) for name in values])
        op = Op(WITH_GRADIENT, outs, (args, args, _refs([renamed.get(n, n) for n in saved])), backward=backward)
        through = dict(zip(values, outs, strict=True))
        for name in values:
            for entry in self.readers.pop(name, []):
                if entry.op.op != HOOKED:
                    entry.op = map_refs(entry.op, lambda name: through.get(name, name))
                    self.readers[through[name]].append(entry)
        self.outputs = [through.get(name, name) for name in self.outputs]
        new = [*copies, _Entry(op, source, -1)]
        self.entries[at:at] = new
        self._index(new)

    def _copies(
        self, names: Iterable[str], at: int, made: dict[str, int], source: str
    ) -> tuple[list[_Entry], dict[str, str]]:
        """Copies of the ops from `at` on that make `names`, without gradients, and the new names of their results."""
        chosen: set[int] = set()
        waiting = list(names)
        while waiting:
            i = made.get(waiting.pop(), -1)
            if i >= at and i not in chosen:
                chosen.add(i)
                waiting.extend(refs(self.entries[i].op))
        renamed: dict[str, str] = {}
        copies: list[_Entry] = []
        for i in sorted(chosen):
            op = map_refs(self.entries[i].op, lambda name: renamed.get(name, name))
            if is_random(op.op) or writes_statistics(op.op) or ALLOWED.get(op.op) == "writes":
                raise TraceError(f"{source}: a gradient hook reads what {op.op} makes from its tensor; make it before")
            renamed.update((out, f"{out}.copy{self.num_hooks}") for out in op.outs if out)
            outs = tuple(renamed.get(out, "") for out in op.outs)
            copies.append(_Entry(msgspec.structs.replace(op, outs=outs, no_grad=True), self.entries[i].source, -1))
        return copies, renamed


def _lists(marker: Op) -> list[list[str]]:
    """The lists of a marker, as names; "" for None."""
    return [[str(a)[1:] if a is not None else "" for a in arg] for arg in marker.args if isinstance(arg, tuple)]


def _refs(names: Iterable[str]) -> tuple[str, ...]:
    return tuple("%" + name for name in names)


def _check_effects(window: Sequence[_Entry]) -> None:
    """Reject a backward pass that changes anything but tensors of its own."""
    own: set[str] = set()
    for entry in window:
        op = entry.op
        target = op.args[0] if op.args else None
        if writes_statistics(op.op) or (ALLOWED.get(op.op) == "writes" and str(target)[1:] not in own):
            raise TraceError(
                f"{entry.source}: a backward pass writes by {op.op} to a tensor that it did not make; "
                "compute a new tensor instead"
            )
        if not may_share_memory(op.op) or own.issuperset(refs(op)):
            own.update(op.outs)


def _backward_of(ops: Sequence[Op], gradients: Sequence[str], results: Sequence[str]) -> tuple[BackwardPass, list[str]]:
    """A backward pass with short names of its own, and the values that it reads from elsewhere."""
    inner = {out for op in ops for out in op.outs}
    read = dict.fromkeys(name for names in (*map(refs, ops), results) for name in names if name)
    saved = [name for name in read if name not in inner and name not in gradients]
    local = {name: f"g{i}" for i, name in enumerate(gradients)} | {name: f"a{i}" for i, name in enumerate(saved)}
    for i, op in enumerate(ops):
        for part, out in enumerate(op.outs):
            if out:
                local.setdefault(out, f"v{i}" if len(op.outs) == 1 else f"v{i}.{part}")
    renamed = [map_refs(op, local.__getitem__) for op in ops]
    return BackwardPass(
        gradients=tuple(local[name] for name in gradients),
        saved=tuple(local[name] for name in saved),
        ops=tuple(
            msgspec.structs.replace(op, outs=tuple(local[o] if o else "" for o in op.outs), no_grad=False)
            for op in renamed
        ),
        results=tuple(local[name] if name else "" for name in results),
    ), saved
