"""Trackio: a local database. `trackio show --project ravnest` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ravnest.events import EndEvent, StartEvent
from ravnest.trackers.tracker import Tracker, load_identity, require_library, save_identity

__all__ = ["TrackioTracker"]


class TrackioTracker(Tracker):
    """Logs to Trackio, by default to its local database. A resumed run continues its run there.

    Args:
        project: Name of the project. Default: "ravnest".
        **options: Further arguments of `trackio.init`, such as `space_id`.

    Raises:
        ValueError: The library is not installed.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        super().__init__()
        self._project, self._options = project or "ravnest", options
        self._library = require_library("trackio", "trackio")

    def open(self, event: StartEvent, parameters: Mapping[str, Any]) -> None:
        """Begin or continue the run."""
        identity = load_identity(event.folder, "trackio") if event.is_resumed else {}
        given = {
            "project": self._project, "name": identity.get("name", event.folder.name), "config": dict(parameters),
            "resume": "allow" if identity else "never", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False,
            **self._options,
        }  # fmt: skip
        self._run = self._library.init(**given)
        save_identity(event.folder, "trackio", {"name": self._run.name})

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log metrics of a step."""
        self._run.log(dict(values), step=step)

    def describe(self, name: str, text: str, step: int) -> None:
        """Log a text."""
        self._run.log({name: text}, step=step)

    def close(self, event: EndEvent) -> None:
        """Finish the run."""
        self._run.finish()
