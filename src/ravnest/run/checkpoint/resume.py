"""Where a run goes on from: a checkpoint, which must be of the same model and optimizer, and the plan that it had.

The number of nodes may be another, and so may the cuts. With as many nodes as before the cuts stay as they were, so
that training goes on bit for bit: a stage's random numbers depend on its place.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from ravnest.core.schedule import StageSchedule
from ravnest.graph import Program, split
from ravnest.pipeline.optimizers import Optimizer
from ravnest.pipeline.state import kind_and_name, owned
from ravnest.run.checkpoint.format import Checkpoint, Manifest, checkpoints_in, choose, fingerprint
from ravnest.run.metrics import ProgressView
from ravnest.run.plan import PipelinePlan

__all__ = ["check_same", "describe", "open_checkpoint", "plan_as_before"]

_MAY_CHANGE = ("lr", "schedule", "clip_norm")


def open_checkpoint(path: Path | str, folder: Path | str | None, show: ProgressView) -> Checkpoint:
    """The checkpoint to go on from: the newest of a run, or the one that is named, if nothing later is in the way."""
    choice = choose(path)
    for sentence in choice.passed_over:
        show.told(sentence)
    checkpoint = choice.checkpoint
    if (checkpoint.run if folder is None else Path(folder).resolve()) == checkpoint.run:
        later = [other.folder.name for other in checkpoints_in(checkpoint.run) if other.step > checkpoint.step]
        if later and not choice.passed_over:
            raise ValueError(
                f"{checkpoint.run} has later checkpoints ({', '.join(later)}): give another --run-dir, or remove them"
            )
    show.told(f"going on from {checkpoint.folder}, after {checkpoint.step} steps")
    return checkpoint


def describe(program: Program, optimizer: Optimizer, plan: PipelinePlan, seed: int) -> Manifest:
    """What the checkpoints of a run are of."""
    return Manifest(
        step=0, batches=0, seed=seed, program=fingerprint(program), optimizer=optimizer,
        names=tuple(s.target for s in (*program.state, *program.idle) if s.persistent), ties=dict(program.ties),
        cuts=plan.cuts, accumulate=plan.accumulate, depths=tuple(rule.depth for rule in plan.rules),
        delays=tuple(rule.delay for rule in plan.rules),
    )  # fmt: skip


def check_same(checkpoint: Checkpoint, program: Program, optimizer: Optimizer) -> list[str]:
    """Refuse a checkpoint of another model or optimizer; what else has changed, in words."""
    _check_model(checkpoint, program)
    before = checkpoint.manifest.optimizer
    now = msgspec.structs.replace(optimizer, **{name: getattr(before, name) for name in _MAY_CHANGE})
    if now != before:
        raise ValueError(
            f"the optimizer is not that of {checkpoint.folder}, whose state would not fit: it was "
            f"{_words(before)}, it is {_words(optimizer)}"
        )
    changed = [name for name in _MAY_CHANGE if getattr(optimizer, name) != getattr(before, name)]
    return [f"{name} is {getattr(optimizer, name)} from now on; it was {getattr(before, name)}" for name in changed]


def _check_model(checkpoint: Checkpoint, program: Program) -> None:
    there = {
        name
        for file in checkpoint.manifest.files
        for kind, name in map(kind_and_name, file.tensors)
        if kind == "weights"
    }
    wanted = {s.target for s in program.state}
    beginning = f"the model is not that of {checkpoint.folder}"
    if missing := sorted(wanted - there):
        raise ValueError(f"{beginning}: {missing[0]} is not in it" + _more(missing))
    if gone := sorted(there - wanted - {s.target for s in program.idle}):
        raise ValueError(f"{beginning}: it has no {gone[0]} any more" + _more(gone))
    if checkpoint.manifest.program != fingerprint(program):
        raise ValueError(
            f"{beginning}: the parameters have the same names, but their shapes, the operations, the loss or the "
            "form of the batches have changed"
        )


def _more(names: list[str]) -> str:
    return f", nor {len(names) - 1} others" if len(names) > 1 else ""


def _words(optimizer: Optimizer) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in sorted(optimizer.settings.items()))
    return f"{optimizer.name}({settings})" + (f" with {_words(optimizer.fallback)}" if optimizer.fallback else "")


def plan_as_before(plan: PipelinePlan, program: Program, manifest: Manifest) -> tuple[PipelinePlan, str]:
    """The plan with the cuts that the run had, if it had as many nodes; and what that means, in words."""
    if plan.accumulate != manifest.accumulate:
        return plan, (
            f"a step has {plan.accumulate} microbatches, it had {manifest.accumulate}: sums are rounded otherwise"
        )
    delays = tuple(rule.delay for rule in plan.rules)
    if len(delays) != len(manifest.delays):
        return plan, f"the model is split over {len(delays)} nodes, it was over {len(manifest.delays)}"
    if delays != manifest.delays:
        return plan, f"gradients are {delays} updates late, they were {manifest.delays}"
    rules = tuple(
        StageSchedule(accumulate=plan.accumulate, depth=depth, delay=delay)
        for depth, delay in zip(manifest.depths, manifest.delays, strict=True)
    )
    bounds = [0, *manifest.cuts, len(program.ops)]
    stages = tuple(split(program, manifest.cuts))
    rows = tuple(
        replace(
            row, first_op=bounds[i], num_ops=bounds[i + 1] - bounds[i], depth=rules[i].depth,
            parameter_bytes=sum(s.num_bytes for s in owned(stage).values() if s.kind == "parameter"),
        )
        for i, (row, stage) in enumerate(zip(plan.plans, stages, strict=True))
    )  # fmt: skip
    reason = "cut as before, to go on bit for bit"
    return replace(plan, stages=stages, plans=rows, rules=rules, cuts=manifest.cuts, reason=reason), reason
