"""Cut a program into stages at any op index.

A value made before a cut and read after it crosses the cut; one that skips a stage is relayed through it. So at
cut c cross exactly the values v with  made(v) < c <= last_read(v).  Three things cross in another form:

- A tied parameter belongs to the first stage that reads it; later stages borrow it (`State.owner`): its values
  come forward and its gradients go back once per update, not once per microbatch.
- A constant buffer is given to every stage that reads it.
- A value that needs no gradient and is cheaply made from less than its own size (an attention mask, rotary
  angles) is not sent: its ops are repeated where it is needed, and what it is made of crosses instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec

from ..core.errors import CutError
from .ops import ALLOWED, FAMILIES, SYM, is_random
from .program import Init, Op, Program, Stage, State, Value, num_bytes, refs

__all__ = ["Cutter", "legal_cuts", "split"]

_TYPICAL_BATCH = 8  # only to compare sizes of values that depend on the batch with those that do not


def legal_cuts(program: Program) -> list[int]:
    """Every index before which the program may be cut."""
    return Cutter(program).legal


def split(program: Program, cuts: Sequence[int]) -> list[Stage]:
    """The stages between `cuts`, indices of the ops before which a new stage starts."""
    return Cutter(program).split(cuts)


class Cutter:
    """Knows for one program which values live where, and so what any cut means."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made: dict[str, int] = {v.name: -1 for v in program.inputs}
        self.reads: list[tuple[str, ...]] = [tuple(dict.fromkeys(refs(op))) for op in program.ops]
        self.state: dict[str, State] = {s.name: s for s in program.state}
        for i, op in enumerate(program.ops):
            self.made.update((out, i) for out in op.outs if out)
        self.sources = _derivable(self)
        self.last_read = self._last_reads()

    def _last_reads(self) -> dict[str, int]:
        """For each value the last op that reads it, or reads something that is remade from it."""
        last: dict[str, int] = {}
        for i, names in enumerate(self.reads):
            for name in names:
                for source in self.sources.get(name, (name,)):
                    last[source] = i
                last[name] = i
        for output in self.program.outputs:
            last[output.name] = len(self.program.ops)
        return last

    @cached_property
    def legal(self) -> list[int]:
        barred = set[int]()
        for first, last in self.program.islands:
            barred.update(range(first + 1, last + 1))
        return [c for c in range(1, len(self.program.ops)) if c not in barred]

    def crossing(self, cut: int) -> tuple[Value, ...]:
        """What is sent forward over a cut; gradients of those with `grad` come back."""
        return tuple(
            self.program.values[name]
            for name, made in self.made.items()
            if made < cut <= self.last_read.get(name, -1) and name not in self.sources
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
                raise CutError(f"cuts must rise: {cut} follows {before}")
            if cut >= len(self.program.ops):
                raise CutError(f"there is no op {cut}: the program has {len(self.program.ops)}")
            if cut not in legal:
                first, last = next((a, b) for a, b in self.program.islands if a < cut <= b)
                raise CutError(
                    f"cut {cut} would part ops {first} to {last}, which write to the same memory: "
                    f"{self.program.sources[last]}. Cut at {first} or {last + 1}"
                )

    def _stage(self, index: int, start: int, stop: int, count: int, owners: dict[str, int]) -> Stage:
        last = index == count - 1
        inputs = self.program.inputs if index == 0 else self.crossing(start)
        outputs = self.program.outputs if last else self.crossing(stop)
        remade = self._remade(start, stop, outputs)
        ops = (*(self.program.ops[i] for i in remade), *self.program.ops[start:stop])
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
            init=self._init(s for s in state if owners[s.name] == index or s.kind == "buffer"),
        )

    def _remade(self, start: int, stop: int, outputs: Iterable[Value]) -> list[int]:
        """Earlier ops that this stage repeats for values it reads and does not receive."""
        wanted = [n for names in self.reads[start:stop] for n in names] + [v.name for v in outputs]
        chosen: set[int] = set()
        while wanted:
            name = wanted.pop()
            if name in self.sources and self.made[name] < start and self.made[name] not in chosen:
                chosen.add(self.made[name])
                wanted.extend(self.reads[self.made[name]])
        return sorted(chosen)

    def _init(self, state: Iterable[State]) -> Init | None:
        if self.program.log is None:
            return None
        return self.program.log.init_for({s.target: self.program.tensors[s.target] for s in state})


def _owned(item: State, index: int, owners: dict[str, int]) -> State:
    """A constant buffer belongs to every stage that has it, a parameter to the first that reads it."""
    return msgspec.structs.replace(item, owner=owners[item.name] if item.kind == "parameter" else index)


def _derivable(cutter: Cutter) -> dict[str, tuple[str, ...]]:
    """Values that are remade where they are needed -> the values that they are made of."""
    made_of: dict[str, tuple[str, ...]] = {}
    pinned = {i for first, last in cutter.program.islands for i in range(first, last + 1)}
    for i, op in enumerate(cutter.program.ops):
        if i in pinned or not _cheap(op) or any(n in cutter.state and cutter.state[n].mutated for n in refs(op)):
            continue
        if any(n in cutter.state and cutter.state[n].kind == "parameter" for n in refs(op)):
            continue
        sources = dict.fromkeys(s for n in refs(op) if n not in cutter.state for s in made_of.get(n, (n,)))
        outs = [cutter.program.values[o] for o in op.outs if o]
        if any(v in cutter.program.outputs for v in outs):
            continue
        if any(v.grad for v in outs) or any(cutter.program.values[s].grad for s in sources):
            continue
        cost = sum(num_bytes(cutter.program.values[s], _TYPICAL_BATCH) for s in sources)
        if cost <= sum(num_bytes(v, _TYPICAL_BATCH) for v in outs):
            made_of.update((v.name, tuple(sources)) for v in outs)
    return made_of


def _cheap(op: Op) -> bool:
    if op.op in SYM or op.op == "aten.sym_size.int":
        return True
    return FAMILIES[ALLOWED[op.op]].cheap and not is_random(op.op)
