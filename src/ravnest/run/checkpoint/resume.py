"""Resumes a run from a checkpoint of the same model and optimizer.

The number of nodes may differ, and so may the cuts. With as many nodes as before the cuts are kept, so that training
continues bit for bit: the random numbers of a stage depend on its position.
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
from ravnest.run.checkpoint.start import frozen_state
from ravnest.run.metrics import ProgressView
from ravnest.run.plan import PipelinePlan

__all__ = ["check_same", "describe", "open_checkpoint", "plan_as_before"]

_MAY_CHANGE = ("lr", "schedule", "clip_norm")


def open_checkpoint(path: Path | str, folder: Path | str | None, view: ProgressView) -> Checkpoint:
    """Return the checkpoint to resume from: the newest of a run, or the one at `path`.

    Raises `ValueError` if the run's directory has later checkpoints, which the resumed run would overwrite.
    """
    choice = choose(path)
    for text in choice.skipped:
        view.message(text)
    checkpoint = choice.checkpoint
    if (checkpoint.run if folder is None else Path(folder).resolve()) == checkpoint.run:
        later = [other.folder.name for other in checkpoints_in(checkpoint.run) if other.step > checkpoint.step]
        if later and not choice.skipped:
            raise ValueError(
                f"{checkpoint.run} has later checkpoints ({', '.join(later)}): give another --run-dir, or remove them"
            )
    view.message(f"resuming from {checkpoint.folder}, after {checkpoint.step} steps")
    return checkpoint


def describe(program: Program, optimizer: Optimizer, plan: PipelinePlan, seed: int) -> Manifest:
    """Return the manifest of a run's checkpoints, without step, batches and files."""
    return Manifest(
        step=0, batches=0, seed=seed, program=fingerprint(program), optimizer=optimizer,
        names=tuple(s.target for s in (*program.state, *program.idle) if s.persistent), ties=dict(program.ties),
        cuts=plan.cuts, accumulate=plan.accumulate, depths=tuple(rule.depth for rule in plan.rules),
        delays=tuple(rule.delay for rule in plan.rules),
    )  # fmt: skip


def check_same(checkpoint: Checkpoint, program: Program, optimizer: Optimizer) -> list[str]:
    """Raise `ValueError` for a checkpoint of another model or optimizer; return messages about other changes."""
    _check_model(checkpoint, program)
    before = checkpoint.manifest.optimizer
    now = msgspec.structs.replace(optimizer, **{name: getattr(before, name) for name in _MAY_CHANGE})
    if now != before:
        raise ValueError(
            f"the optimizer is not that of {checkpoint.folder}, whose state does not match: it was "
            f"{_summary(before)}, it is {_summary(optimizer)}"
        )
    changed = [name for name in _MAY_CHANGE if getattr(optimizer, name) != getattr(before, name)]
    return [f"{name} changes from {getattr(before, name)} to {getattr(optimizer, name)}" for name in changed]


def _check_model(checkpoint: Checkpoint, program: Program) -> None:
    stored = {name for kind, name in map(kind_and_name, checkpoint.places) if kind == "weights"}
    known = {s.target for s in (*program.state, *program.idle)}
    needed = {s.target for s in (*program.state, *frozen_state(program)) if s.persistent or not s.is_frozen}
    mismatch = f"the model is not that of {checkpoint.folder}"
    if missing := sorted(needed - stored):
        raise ValueError(f"{mismatch}: the checkpoint lacks {missing[0]}" + _more(missing))
    if removed := sorted(stored - known):
        raise ValueError(f"{mismatch}: the model lacks {removed[0]}" + _more(removed))
    if checkpoint.manifest.program != fingerprint(program):
        raise ValueError(
            f"{mismatch}: the parameters have the same names, but their shapes, the operations, the loss or the "
            "form of the batches have changed"
        )


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _summary(optimizer: Optimizer) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in sorted(optimizer.settings.items()))
    return f"{optimizer.name}({settings})" + (f" with {_summary(optimizer.fallback)}" if optimizer.fallback else "")


def plan_as_before(plan: PipelinePlan, program: Program, manifest: Manifest) -> tuple[PipelinePlan, str]:
    """Return the plan with the cuts of the checkpoint if it has as many nodes, and a message about changes."""
    if plan.accumulate != manifest.accumulate:
        return plan, (
            f"a step has {plan.accumulate} microbatches, it had {manifest.accumulate}: sums are rounded differently"
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
    reason = "cut as before, so that training continues bit for bit"
    return replace(plan, stages=stages, plans=rows, rules=rules, cuts=manifest.cuts, reason=reason), reason
