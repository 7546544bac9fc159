"""Weights & Biases: a run with its files in the run's directory. Environment variables of wandb have their effect."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ravnest.events import EndEvent, StartEvent
from ravnest.trackers.tracker import Tracker, load_identity, require_library, save_identity

__all__ = ["WandbTracker"]


class WandbTracker(Tracker):
    """Logs to Weights & Biases; with `WANDB_MODE=offline` to files alone. A resumed run continues its run there.

    Args:
        project: Name of the project. Default: `WANDB_PROJECT`, else "ravnest".
        **options: Further arguments of `wandb.init`.

    Raises:
        ValueError: The library is not installed, or it has no API key and is not offline.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        super().__init__()
        self._project, self._options = project or os.environ.get("WANDB_PROJECT") or "ravnest", options
        self._library = require_library("wandb", "wandb")
        is_local = (options.get("mode") or os.environ.get("WANDB_MODE")) in ("offline", "disabled", "dryrun")
        if not is_local and not self._library.login(prompt=False, verify=False):
            raise ValueError("tracking with wandb needs its API key: run `wandb login`, or set WANDB_MODE=offline")

    def open(self, event: StartEvent, parameters: Mapping[str, Any]) -> None:
        """Begin or continue the run; metrics have the run's own step, so that a step may be logged again."""
        identity = load_identity(event.folder, "wandb") if event.is_resumed else {}
        given = {
            "project": self._project, "name": event.folder.name, "dir": str(event.folder), "id": identity.get("id"),
            "resume": "allow" if identity else None, "config": dict(parameters), **self._options,
        }  # fmt: skip
        self._run = self._library.init(**given)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        save_identity(event.folder, "wandb", {"id": self._run.id})

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of a step."""
        self._run.log({"step": step, **values})

    def describe(self, name: str, text: str, step: int) -> None:
        """Put a text into the summary."""
        self._run.summary[name] = text

    def close(self, event: EndEvent) -> None:
        """Finish the run, with code 1 if it failed."""
        self._run.summary["outcome"] = f"{event.outcome}: {event.reason}" if event.reason else event.outcome
        self._run.finish(exit_code=int(event.outcome == "failed"))
