"""The groups of experiments: rows as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec

from benchmarks.learning.experiment import Averaging, Experiment
from benchmarks.learning.study import FIRST_RATES, Row
from benchmarks.learning.tasks import BASIN
from ravnest.pipeline.staleness import DEFAULT, Correction, delay_compensation, look_ahead, lr_discount, none

__all__ = [
    "BASELINE", "CLUSTER_VARIANTS", "DELAYS", "GROUPS", "PIPELINES", "PROGRESS", "STALENESS", "STALENESS_UPDATES",
    "SPEEDUP_COPIES", "basin", "pipeline_name", "rows_of",
]  # fmt: skip

BASELINE = "synchronous"
EVERY_MICROBATCH = (6, 4, 2, 0)  # the paper's delays, with four stages
CORRECTIONS: Mapping[str, Correction] = {
    "none": none(), "error feedback (look-ahead 1)": look_ahead(1.0), "look-ahead 1 + bend (default)": DEFAULT,
    "delay compensation 1": delay_compensation(1.0), "look-ahead 1 + half the bend": look_ahead(1.0, curvature=0.5),
    "look-ahead 1.5": look_ahead(1.5), "lr discount 0.5": lr_discount(0.5),
}  # fmt: skip
_MAIN = ("none", "error feedback (look-ahead 1)", "look-ahead 1 + bend (default)")
PIPELINES: tuple[tuple[str, str, int], ...] = (  # task, optimizer, batch
    *(("small", optimizer, 32) for optimizer in ("AdamW", "Muon", "SOAP", "LAMB")),
    *(("small", optimizer, batch) for optimizer, batch in product(("AdamW", "Muon"), (8, 128))),
    *(("small, GPT-2", optimizer, 32) for optimizer in ("AdamW", "Muon")),
    *((task, optimizer, 32) for task, optimizer in product(("medium", "medium, GPT-2"), ("AdamW", "Muon"))),
)


def pipeline_name(task: str, optimizer: str, batch: int, mode: str) -> str:
    return f"{task} | {optimizer} | {batch} | {mode}"


def pipeline() -> Iterator[Row]:
    """One pipeline whose gradients are one update late, without and with corrections."""
    for task, optimizer, batch in PIPELINES:
        shared: dict[str, Any] = {"task": task, "optimizer": optimizer, "batch": batch}
        yield Row(name=pipeline_name(task, optimizer, batch, BASELINE), experiment=Experiment(**shared))
        is_main = (task, batch) == ("small", 32)
        for mode in CORRECTIONS if is_main else _MAIN:
            late = Experiment(**shared, delays=(1,), correction=CORRECTIONS[mode])
            yield Row(name=pipeline_name(task, optimizer, batch, mode), experiment=late)
        if is_main and optimizer == "AdamW":
            late = Experiment(task=task, optimizer="NAdam 0.99", batch=batch, delays=(1,))
            yield Row(name=pipeline_name(task, optimizer, batch, "NAdam 0.99"), experiment=late)
            for mode in _MAIN:
                late = Experiment(**shared, delays=EVERY_MICROBATCH, correction=CORRECTIONS[mode])
                yield Row(name=pipeline_name(task, optimizer, batch, f"the paper's, {mode}"), experiment=late)


_DIVIDED: dict[str, Any] = {"delays": (1,), "correction": DEFAULT, "memory": "exact"}
CLUSTER_VARIANTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # copies, and what differs from the baseline
    BASELINE: (1, {}),
    "4 clusters, H = 4": (4, _DIVIDED),
    "4 clusters, H = 4, gradients in time": (4, {}),
    "4 clusters, H = 1": (4, {**_DIVIDED, "averaging": Averaging(interval=1)}),
    "4 clusters, H = 4, moments averaged": (4, {**_DIVIDED, "averaging": Averaging(moments="all")}),
    "4 clusters, H = 4, error feedback only": (4, {**_DIVIDED, "correction": look_ahead(1.0)}),
    "4 clusters, H = 4 in four fragments": (4, {**_DIVIDED, "averaging": Averaging(fragments=4)}),
    "4 clusters, H = 1 to 8": (4, {**_DIVIDED, "averaging": Averaging(interval=1, final_interval=8)}),
    "4 clusters, H = 8 to 1": (4, {**_DIVIDED, "averaging": Averaging(interval=8, final_interval=1)}),
    "4 clusters, H = 4, int8": (4, {**_DIVIDED, "averaging": Averaging(codec="int8")}),
    "4 clusters, H = 30": (4, {**_DIVIDED, "averaging": Averaging(interval=30)}),
    "4 clusters, H = 30, outer momentum 0.6": (
        4, {**_DIVIDED, "averaging": Averaging(interval=30, outer_lr=0.7, outer_momentum=0.6)}
    ),
    "4 clusters, H = 30, int4": (
        4, {**_DIVIDED, "averaging": Averaging(interval=30, codec="int4", of_movements=True)}
    ),
    "4 clusters, H = 30, top16": (
        4, {**_DIVIDED, "averaging": Averaging(interval=30, codec="top16", of_movements=True)}
    ),
    "8 clusters, H = 4": (8, _DIVIDED),
}  # fmt: skip
_SAMPLES = 32  # of an update of all clusters of four, and of the baseline


def clusters() -> Iterator[Row]:
    """Clusters that average, against synchronous training on the same samples."""
    for optimizer in ("AdamW", "Muon"):
        for name, (copies, settings) in CLUSTER_VARIANTS.items():
            batch = _SAMPLES if copies == 1 else _SAMPLES // 4
            experiment = Experiment(optimizer=optimizer, batch=batch, copies=copies, **settings)
            yield Row(name=f"{optimizer} | {name}", experiment=experiment)
        large = Experiment(optimizer=optimizer, batch=2 * _SAMPLES)
        yield Row(name=f"{optimizer} | {BASELINE}, samples of 8 clusters", experiment=large)


PROGRESS = (300, 950, 3000, 9500, 30000)  # updates K, over two decades
DELAYS: Mapping[str, tuple[int, ...]] = {
    "delay 0": (0,), "delay 1": (1,), "delay 4": (4,), "delays 6 4 2 0": EVERY_MICROBATCH,
}  # fmt: skip
SPEEDUP_COPIES = (1, 2, 4, 8, 16)
SPEEDUP_UPDATES = 16000
SPEEDUP_EVERY = 4


def basin(updates: int, delays: tuple[int, ...], copies: int = 1, **others: Any) -> Experiment:
    """The problem with known constants, trained by SGD with the step size of the theorem."""
    return Experiment(
        task="basin", optimizer="SGD", schedule="constant", batch=1, updates=updates, delays=delays, copies=copies,
        lr=float(f"{BASIN.step_size(updates, copies):.6g}"), **others,
    )  # fmt: skip


def rate() -> Iterator[Row]:
    """The mean squared gradient norm over K."""
    for (name, delays), updates in product(DELAYS.items(), PROGRESS):
        yield Row(name=f"{name} | {updates}", experiment=basin(updates, delays))


def speedup() -> Iterator[Row]:
    """The mean squared gradient norm over K for C clusters, to find the K that reaches a given one."""
    for copies in SPEEDUP_COPIES:
        for updates in (SPEEDUP_UPDATES // copies // 2, SPEEDUP_UPDATES // copies, SPEEDUP_UPDATES // copies * 2):
            averaging = Averaging(interval=SPEEDUP_EVERY)
            yield Row(name=f"{copies} | {updates}", experiment=basin(updates, (1,), copies, averaging=averaging))


STALENESS = (0, 1, 2, 4, 8, 16, 32, 64)
STALENESS_UPDATES = (300, 3000, 30000)


def staleness() -> Iterator[Row]:
    """The mean squared gradient norm over the delay, for several K."""
    for updates, delay in product(STALENESS_UPDATES, STALENESS):
        yield Row(name=f"{updates} | {delay}", experiment=basin(updates, (delay,)))


def blocks() -> Iterator[Row]:
    """Two clusters with the same cuts and with different ones, with the paper's delays."""
    for name, cuts in {"same cuts": ((0.5,), (0.5,)), "different cuts": ((0.3,), (0.7,))}.items():
        yield Row(
            name=name,
            experiment=basin(3000, (2, 0), 2, cuts=cuts, averaging=Averaging(interval=SPEEDUP_EVERY)),
        )


GROUPS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "rate": rate, "staleness": staleness, "speedup": speedup, "blocks": blocks, "pipeline": pipeline,
    "clusters": clusters,
}  # fmt: skip
_QUICK_UPDATES, _QUICK_THEORY_UPDATES = 96, 1000
_QUICK_ROWS = (
    *(pipeline_name("small", "AdamW", 32, mode) for mode in (BASELINE, "none", "look-ahead 1 + bend (default)")),
    *(f"AdamW | {name}" for name in (BASELINE, "4 clusters, H = 4")),
)


def rows_of(group: str, *, quick: bool = False) -> list[Row]:
    """The rows of a group; quick: a few of them, shorter, at a rate that is not tuned."""
    rows = list(GROUPS[group]())
    if not quick:
        return rows
    if group not in ("pipeline", "clusters"):
        return [row for row in rows if row.experiment.updates <= _QUICK_THEORY_UPDATES]
    short = {"updates": _QUICK_UPDATES, "lr": FIRST_RATES["AdamW"]}
    return [
        replace(row, experiment=msgspec.structs.replace(row.experiment, **short))
        for row in rows
        if row.name in _QUICK_ROWS
    ]
