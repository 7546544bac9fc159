"""MLflow: a run at the tracking server, or in the database `mlflow.db` of the run's directory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from ravnest.events import EndEvent, StartEvent
from ravnest.trackers.tracker import Tracker, load_identity, require_library, save_identity

__all__ = ["MlflowTracker"]

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_VALUE = 5_000  # letters of a parameter or tag


class MlflowTracker(Tracker):
    """Logs to MLflow, by its client and not by the active run of this process. A resumed run continues its run there.

    Args:
        tracking_uri: Where to log. Default: `MLFLOW_TRACKING_URI`, else the file `mlflow.db` in the run's directory:
            `mlflow ui --backend-store-uri sqlite:///runs/mine/mlflow.db` shows it.
        experiment: Name of the experiment. Default: `MLFLOW_EXPERIMENT_NAME`, else "ravnest".

    Raises:
        ValueError: The library is not installed.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        super().__init__()
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ravnest"
        require_library("sqlalchemy", "mlflow")
        self._library = require_library("mlflow", "mlflow")

    def open(self, event: StartEvent, parameters: Mapping[str, Any]) -> None:
        """Create a run, or set that of a resumed run to running; its parameters stay those of its first start."""
        uri = self._uri or f"sqlite:///{event.folder / 'mlflow.db'}"
        self._client = self._library.MlflowClient(tracking_uri=uri)
        identity = load_identity(event.folder, "mlflow") if event.is_resumed else {}
        if identity.get("uri") == uri:
            self._run_id = identity["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            experiment = found.experiment_id
        else:
            artifacts = None if self._uri else (event.folder / "mlflow").as_uri()
            experiment = self._client.create_experiment(self._experiment, artifact_location=artifacts)
        self._run_id = self._client.create_run(experiment, run_name=event.folder.name).info.run_id
        save_identity(event.folder, "mlflow", {"uri": uri, "run_id": self._run_id})
        entities = self._library.entities
        self._client.log_batch(
            self._run_id,
            params=[entities.Param(name, str(value)[:_MAX_VALUE]) for name, value in parameters.items()],
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of a step in one request."""
        now_ms, metric = int(time.time() * 1000), self._library.entities.Metric
        self._client.log_batch(self._run_id, [metric(name, value, now_ms, step) for name, value in values.items()])

    def describe(self, name: str, text: str, step: int) -> None:
        """Set a tag."""
        self._client.set_tag(self._run_id, name, text[:_MAX_VALUE])

    def close(self, event: EndEvent) -> None:
        """End the run with its outcome."""
        if event.reason:
            self._client.set_tag(self._run_id, "reason", event.reason[:_MAX_VALUE])
        self._client.set_terminated(self._run_id, status=_STATUS[event.outcome])
