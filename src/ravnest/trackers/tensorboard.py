"""TensorBoard: event files in the folder `tensorboard` of the run. `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ravnest.events import EndEvent, StartEvent
from ravnest.trackers.tracker import Tracker, require_library

__all__ = ["TensorBoardTracker"]

_FLUSH_S = 5


class TensorBoardTracker(Tracker):
    """Writes event files for TensorBoard. A resumed run adds to them.

    Args:
        log_dir: Directory of the event files. Default: `tensorboard` in the run's directory.

    Raises:
        ValueError: The library is not installed.
    """

    def __init__(self, log_dir: Path | str | None = None) -> None:
        super().__init__()
        self._log_dir = log_dir
        require_library("tensorboard", "tensorboard")
        self._library = require_library("torch.utils.tensorboard", "tensorboard")

    def open(self, event: StartEvent, parameters: Mapping[str, Any]) -> None:
        """Open an event file; TensorBoard drops steps of earlier files that are trained again."""
        path = Path(self._log_dir) if self._log_dir is not None else event.folder / "tensorboard"
        purge_step = event.step + 1 if event.is_resumed else None
        self._writer = self._library.SummaryWriter(str(path), purge_step=purge_step, flush_secs=_FLUSH_S)
        rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in parameters.items())
        self._writer.add_text("parameters", f"| parameter | value |\n|---|---|\n{rows}", event.step)
        self._writer.flush()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def describe(self, name: str, text: str, step: int) -> None:
        """Write a text."""
        self._writer.add_text(name, f"```\n{text}\n```", step)

    def close(self, event: EndEvent) -> None:
        """Write what is left, and close the file."""
        if event.reason:
            self._writer.add_text("end", event.reason, event.step)
        self._writer.close()


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
