"""Trackers of experiments, as callbacks: TensorBoard, Weights & Biases, MLflow and Trackio.

`job.train(track="tensorboard")` and `ravnest train --track tensorboard` use one with its defaults. For other settings,
give one as a callback: `callbacks=[ravnest.trackers.WandbTracker(project="mine")]`. Each needs its library, which is an
extra of Ravnest.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ravnest.events import Callback

if TYPE_CHECKING:
    from ravnest.trackers.mlflow import MlflowTracker
    from ravnest.trackers.tensorboard import TensorBoardTracker
    from ravnest.trackers.trackio import TrackioTracker
    from ravnest.trackers.wandb import WandbTracker

__all__ = ["TRACKERS", "MlflowTracker", "TensorBoardTracker", "TrackioTracker", "WandbTracker", "make_trackers"]

_CLASSES = {
    "tensorboard": "TensorBoardTracker", "wandb": "WandbTracker", "mlflow": "MlflowTracker",
    "trackio": "TrackioTracker",
}  # fmt: skip
TRACKERS = tuple(_CLASSES)


def __getattr__(name: str) -> Any:
    for module, class_name in _CLASSES.items():
        if name == class_name:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_trackers(names: Iterable[str]) -> list[Callback]:
    """Return the trackers of these names; raises `ValueError` if the library of one is not installed."""
    return [__getattr__(_CLASSES[name])() for name in names]
