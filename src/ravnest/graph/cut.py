"""Cuts a program into stages, at any op index.

A value made before a cut and read after it crosses the cut; one that skips a stage is relayed through it. The values
v that cross cut c are therefore those with  made(v) < c <= last_read(v).  Three exceptions:

- A tied parameter belongs to the first stage that reads it; later stages borrow it (`StateSpec.owner`): its values
  go forward and its gradients go back once per update, not once per microbatch.
- A frozen parameter or constant buffer is part of every stage that reads it.
- A value without gradient that is cheap to compute from smaller values (an attention mask, rotary angles) is
  rematerialized: the stage that reads it repeats its ops, and the values it is computed from cross instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec

from ravnest.errors import CutError
from ravnest.graph.ops import ALLOWED, FAMILIES, SYM, WITH_GRADIENT, is_random
from ravnest.graph.program import Init, Op, Program, Stage, StateSpec, Value, num_bytes, refs

__all__ = ["Cutter", "legal_cuts", "split"]

_TYPICAL_BATCH = 8  # to compare sizes that depend on the batch with fixed ones


def legal_cuts(program: Program) -> list[int]:
    """The op indices before which the program may be cut."""
    return Cutter(program).legal


def split(program: Program, cuts: Sequence[int]) -> list[Stage]:
    """The stages between `cuts`, the op indices before which a new stage starts."""
    return Cutter(program).split(cuts)


class Cutter:
    """The live ranges of a program's values, from which every cut follows."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made: dict[str, int] = {v.name: -1 for v in program.inputs}
        self.reads: list[tuple[str, ...]] = [tuple(dict.fromkeys(refs(op))) for op in program.ops]
        self.state: dict[str, StateSpec] = {s.name: s for s in program.state}
        for i, op in enumerate(program.ops):
            self.made.update((out, i) for out in op.outs if out)
        self.rematerialized = _rematerializable(self)
        self.last_read = self._last_reads()

    def _last_reads(self) -> dict[str, int]:
        """For each value the last op that reads it or a value rematerialized from it."""
        last: dict[str, int] = {}
        for i, names in enumerate(self.reads):
            for name in names:
                for source in self.rematerialized.get(name, (name,)):
                    last[source] = i
                last[name] = i
        for output in self.program.outputs:
            last[output.name] = len(self.program.ops)
        return last

    @cached_property
    def legal(self) -> list[int]:
        illegal = set[int]()
        for first, last in self.program.atomic_ranges:
            illegal.update(range(first + 1, last + 1))
        return [c for c in range(1, len(self.program.ops)) if c not in illegal]

    def crossing(self, cut: int) -> tuple[Value, ...]:
        """The values sent forward over a cut; gradients of those with `grad` come back."""
        return tuple(
            self.program.values[name]
            for name, made in self.made.items()
            if made < cut <= self.last_read.get(name, -1) and name not in self.rematerialized
        )

    def split(self, cuts: Sequence[int]) -> list[Stage]:
        self._check(cuts)
        bounds = [0, *cuts, len(self.program.ops)]
        owners: dict[str, int] = {}
        stages = []
        for index, (start, stop) in enumerate(pairwise(bounds)):
            stages.append(self._stage(index, start, stop, len(bounds) - 1, owners))
        return stages

    def _check(self, cuts: Sequence[int]) -> None:
        legal = set(self.legal)
        for before, cut in zip([0, *cuts], cuts, strict=False):
            if cut <= before:
                raise CutError(f"cuts must be increasing and > 0: {cut} follows {before}")
            if cut >= len(self.program.ops):
                raise CutError(f"cut {cut} is out of range: the program has {len(self.program.ops)} ops")
            if cut not in legal:
                first, last = next((a, b) for a, b in self.program.atomic_ranges if a < cut <= b)
                raise CutError(
                    f"cut {cut} would separate ops {first} to {last}, which write to the same memory: "
                    f"{self.program.sources[last]}. Cut at {first} or {last + 1}"
                )

    def _stage(self, index: int, start: int, stop: int, count: int, owners: dict[str, int]) -> Stage:
        last = index == count - 1
        inputs = self.program.inputs if index == 0 else self.crossing(start)
        outputs = self.program.outputs if last else self.crossing(stop)
        repeated = self._rematerialized_ops(start, stop, outputs)
        ops = (*(self.program.ops[i] for i in repeated), *self.program.ops[start:stop])
        state = [self.state[n] for n in dict.fromkeys(n for op in ops for n in refs(op)) if n in self.state]
        for item in state:
            owners.setdefault(item.name, index)
        return Stage(
            index=index,
            count=count,
            inputs=inputs,
            outputs=outputs,
            state=tuple(_owned(item, index, owners) for item in state),
            ops=ops,
            init=self._init(s for s in state if owners[s.name] == index or s.is_frozen),
            prediction=self.program.prediction if last else None,
        )

    def _rematerialized_ops(self, start: int, stop: int, outputs: Iterable[Value]) -> list[int]:
        """Earlier ops that this stage repeats, for values it reads and does not receive."""
        needed = [n for names in self.reads[start:stop] for n in names] + [v.name for v in outputs]
        chosen: set[int] = set()
        while needed:
            name = needed.pop()
            if name in self.rematerialized and self.made[name] < start and self.made[name] not in chosen:
                chosen.add(self.made[name])
                needed.extend(self.reads[self.made[name]])
        return sorted(chosen)

    def _init(self, state: Iterable[StateSpec]) -> Init | None:
        if self.program.init_log is None or not self.program.is_self_initialising:
            return None
        return self.program.init_log.init_for({s.target: self.program.tensors[s.target] for s in state})


def _owned(item: StateSpec, index: int, owners: dict[str, int]) -> StateSpec:
    """Set the owner: of frozen state every stage that reads it, of a parameter the first one."""
    return msgspec.structs.replace(item, owner=index if item.is_frozen else owners[item.name])


def _rematerializable(cutter: Cutter) -> dict[str, tuple[str, ...]]:
    """Values that are rematerialized -> the values they are computed from."""
    computed_from: dict[str, tuple[str, ...]] = {}
    atomic = {i for first, last in cutter.program.atomic_ranges for i in range(first, last + 1)}
    for i, op in enumerate(cutter.program.ops):
        if i in atomic or not _is_cheap(op) or any(n in cutter.state and cutter.state[n].mutated for n in refs(op)):
            continue
        if any(n in cutter.state and cutter.state[n].kind == "parameter" for n in refs(op)):
            continue
        sources = dict.fromkeys(s for n in refs(op) if n not in cutter.state for s in computed_from.get(n, (n,)))
        outs = [cutter.program.values[o] for o in op.outs if o]
        if any(v in cutter.program.outputs for v in outs):
            continue
        if any(v.grad for v in outs) or any(cutter.program.values[s].grad for s in sources):
            continue
        cost = sum(num_bytes(cutter.program.values[s], _TYPICAL_BATCH) for s in sources)
        if cost <= sum(num_bytes(v, _TYPICAL_BATCH) for v in outs):
            computed_from.update((v.name, tuple(sources)) for v in outs)
    return computed_from


def _is_cheap(op: Op) -> bool:
    if op.op in SYM or op.op == "aten.sym_size.int":
        return True
    if op.op == WITH_GRADIENT:
        return False
    return FAMILIES[ALLOWED[op.op]].cheap and not is_random(op.op)
