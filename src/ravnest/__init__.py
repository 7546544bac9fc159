"""Ravnest trains a PyTorch model that fits on none of your machines, on all of them.

Names are imported on first use, so that a command that does not train does not import torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ravnest.errors import (
    CutError,
    NotFinite,
    ProgramError,
    RavnestError,
    TraceError,
    UnsupportedOp,
    WeightsError,
    WorkerLost,
)

if TYPE_CHECKING:
    from ravnest import events, lr, staleness, trackers
    from ravnest.api import EventStream, Job, Run, TrainingConfig, pretrained
    from ravnest.events import Callback, StopTraining
    from ravnest.pipeline.optimizers import LAMB, SGD, SOAP, Adam, AdamW, Muon, NAdam, Optimizer
    from ravnest.pipeline.staleness import Correction

__version__ = version("ravnest")

__all__ = [
    "__version__",
    "Job", "Run", "TrainingConfig", "pretrained",
    "Callback", "EventStream", "StopTraining", "events", "trackers",
    "Optimizer", "SGD", "Adam", "AdamW", "NAdam", "Muon", "SOAP", "LAMB", "lr",
    "Correction", "staleness",
    "RavnestError", "TraceError", "UnsupportedOp", "CutError", "ProgramError", "WeightsError", "WorkerLost",
    "NotFinite",
]  # fmt: skip

_HOMES = {
    "api": ("EventStream", "Job", "Run", "TrainingConfig", "pretrained"),
    "events": ("Callback", "StopTraining"),
    "pipeline.staleness": ("Correction",),
    "pipeline.optimizers": ("SGD", "Adam", "AdamW", "Muon", "NAdam", "SOAP", "LAMB", "Optimizer"),
}
_MODULES = ("events", "lr", "staleness", "trackers")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value
