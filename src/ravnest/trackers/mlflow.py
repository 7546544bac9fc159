"""MLflow: a run at the tracking server, or in the database `mlflow.db` of the run's directory."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from ravnest.events import EndEvent, StartEvent
from ravnest.trackers.tracker import Tracker, load_identity, require_library, save_identity

__all__ = ["MlflowTracker"]

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_VALUE = 5_000  # letters of a parameter or tag
_SEND_S = 1.0
_SEND_METRICS = 500  # of a request; MLflow takes 1,000


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
        self._waiting: list[Any] = []
        self._sent_s = 0.0
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
            params=[entities.Param(_allowed(name), str(value)[:_MAX_VALUE]) for name, value in parameters.items()],
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of a step; those of about a second go in one request."""
        now_s = time.time()
        metric = self._library.entities.Metric
        self._waiting += [metric(_allowed(name), value, int(now_s * 1000), step) for name, value in values.items()]
        if now_s - self._sent_s >= _SEND_S or len(self._waiting) >= _SEND_METRICS:
            self._send(now_s)

    def _send(self, now_s: float) -> None:
        while self._waiting:
            self._client.log_batch(self._run_id, self._waiting[:_SEND_METRICS])
            del self._waiting[:_SEND_METRICS]
        self._sent_s = now_s

    def describe(self, name: str, text: str, step: int) -> None:
        """Set a tag."""
        self._client.set_tag(self._run_id, name, text[:_MAX_VALUE])

    def close(self, event: EndEvent) -> None:
        """Send what is left, and end the run with its outcome."""
        self._send(time.time())
        if event.reason:
            self._client.set_tag(self._run_id, "reason", event.reason[:_MAX_VALUE])
        self._client.set_terminated(self._run_id, status=_STATUS[event.outcome])


def _allowed(name: str) -> str:
    """Return a name without characters that MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name)
