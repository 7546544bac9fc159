"""The result of a training."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ravnest.core.metrics import StageMetrics
from ravnest.dashboard.contributions import NodeContribution
from ravnest.run.html import folder_html
from ravnest.run.plan import PipelinePlan

__all__ = ["Run", "read_model"]


@dataclass(frozen=True)
class Run:
    """A finished training. Displayed in a notebook, it shows curves, plan and latest events.

    Attributes:
        folder: The run's directory, with `model.safetensors`, `metrics.jsonl`, `plan.json` and logs.
        plan: The plan of the cluster whose weights became the model.
        losses: The training loss of every step, in the order in which steps were finished.
        evaluations: Every evaluation on held-out data: `step` and the reported values.
        stages: The last metrics of each stage of that cluster.
        samples_per_s: The mean throughput.
        steps: The steps of the whole run; `losses` has those since it was last resumed.
        contributions: What every node has contributed to the whole run, by its name.
    """

    folder: Path
    plan: PipelinePlan
    losses: list[float]
    evaluations: list[dict[str, float]]
    stages: dict[int, StageMetrics]
    samples_per_s: float
    steps: int = 0
    contributions: dict[str, NodeContribution] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained weights under the model's own names, tied ones included."""
        return read_model(self.folder / "model.safetensors")

    def _repr_html_(self) -> str:
        """Return curves, plan and latest events, for notebooks."""
        return folder_html(self.folder, "finished")


def read_model(path: Path | str) -> dict[str, Tensor]:
    """Read the weights in a `model.safetensors` of a run."""
    with safe_open(path, framework="pt") as file:
        ties = json.loads((file.metadata() or {}).get("ties", "{}"))
    tensors: dict[str, Tensor] = load_file(path)
    return {**tensors, **{name: tensors[kept] for name, kept in ties.items()}}
