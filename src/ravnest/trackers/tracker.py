"""What all trackers do: parameters from configuration and plans, metrics by step, and the identity of a tracked run.

| name | value |
|---|---|
| `loss`, and the further values of the loss function | of each step |
| `validation/loss`, ... | of each evaluation |
| `learning_rate`, `samples_per_s`, `staleness`, `samples`, `seconds` | at each step |
| `round/seconds` | of each round of averaging |
| `nodes` | number of nodes, when it changes |

The file `trackers.json` in the run's folder holds what a resumed run needs to continue the same run of a tracker.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ravnest.events import (
    Callback,
    EndEvent,
    EvaluationEvent,
    NodeJoinedEvent,
    NodeLostEvent,
    PlanEvent,
    RoundEvent,
    StartEvent,
    StepEvent,
)

__all__ = ["Tracker", "load_identity", "require_library", "save_identity"]

_FILE = "trackers.json"


def require_library(module: str, name: str) -> Any:
    """Import the library of a tracker; raises `ValueError` with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(
            f"tracking with {name} needs its library ({error}): run pip install -e '.[{name}]' in the folder of "
            "Ravnest's source"
        ) from error


class Tracker(Callback, ABC):
    """Base class of trackers: turns events into parameters and metrics."""

    def __init__(self) -> None:
        self._nodes: set[str] = set()

    # what a tracker must be able to do

    @abstractmethod
    def open(self, event: StartEvent, parameters: Mapping[str, Any]) -> None:
        """Begin a run of the tracker, or continue that of a resumed run."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of a step."""

    @abstractmethod
    def describe(self, name: str, text: str, step: int) -> None:
        """Log a text, such as a plan."""

    @abstractmethod
    def close(self, event: EndEvent) -> None:
        """End the run of the tracker."""

    # events

    def on_start(self, event: StartEvent) -> None:
        optimizer = {f"optimizer/{name}": value for name, value in flatten(event.optimizer).items()}
        parameters = {"name": event.name, "batch_size": event.batch_size, **optimizer, **flatten(event.config)}
        self.open(event, parameters)

    def on_plan(self, event: PlanEvent) -> None:
        content = {"nodes": event.nodes, "expected samples/s": event.samples_per_s, **event.plan}
        self.describe(f"plan/{event.cluster}", json.dumps(content, indent=1), event.step)

    def on_step(self, event: StepEvent) -> None:
        self.log(
            {
                "loss": event.loss, **event.metrics, "learning_rate": event.learning_rate,
                "samples_per_s": event.samples_per_s, "staleness": event.staleness, "samples": float(event.samples),
                "seconds": event.seconds,
            },
            event.step,
        )  # fmt: skip

    def on_evaluation(self, event: EvaluationEvent) -> None:
        values = {"loss": event.loss, **event.metrics}
        self.log({f"validation/{name}": value for name, value in values.items()}, event.step)

    def on_round(self, event: RoundEvent) -> None:
        if not event.reason:
            self.log({"round/seconds": event.took_s}, event.step)

    def on_node_joined(self, event: NodeJoinedEvent) -> None:
        self._nodes.add(event.node)
        self.log({"nodes": float(len(self._nodes))}, event.step)

    def on_node_lost(self, event: NodeLostEvent) -> None:
        self._nodes.discard(event.node)
        self.log({"nodes": float(len(self._nodes))}, event.step)

    def on_end(self, event: EndEvent) -> None:
        self.close(event)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with names joined by `/`; lists become text."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = json.dumps(value) if isinstance(value, list | tuple) else value
    return flat


def load_identity(folder: Path, tracker: str) -> dict[str, str]:
    """Return what `save_identity` saved for a tracker; empty if it did not."""
    with contextlib.suppress(OSError, ValueError):
        saved = json.loads((folder / _FILE).read_text())
        if isinstance(saved, dict) and isinstance(saved.get(tracker), dict):
            return {str(name): str(value) for name, value in saved[tracker].items()}
    return {}


def save_identity(folder: Path, tracker: str, identity: Mapping[str, str]) -> None:
    """Keep the identity of a tracker's run for a resumed run."""
    saved: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        saved = json.loads((folder / _FILE).read_text())
    draft = folder / f".{_FILE}"
    draft.write_text(json.dumps({**saved, tracker: dict(identity)}, indent=1) + "\n")
    draft.replace(folder / _FILE)
