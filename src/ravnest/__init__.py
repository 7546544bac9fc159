"""Ravnest trains a PyTorch model that fits on none of your machines, on all of them.

Names are looked up when they are used, so that a command that does not train does not wait for torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .core.errors import (
    CutError,
    NotFinite,
    ProgramError,
    RavnestError,
    TraceError,
    UnsupportedOp,
    WeightsError,
    WorkerLost,
)  # fmt: skip

if TYPE_CHECKING:
    from .api import Job, Run, Training
    from .runtime.corrections import Correction, delay_compensation, look_ahead, lr_discount, none
    from .runtime.optimizers import SGD, Adam, AdamW, Muon, NAdam, Optimizer, constant, cosine, linear

__version__ = version("ravnest")

__all__ = [
    "__version__",
    "Job", "Run", "Training",
    "Optimizer", "SGD", "Adam", "AdamW", "NAdam", "Muon", "constant", "linear", "cosine",
    "Correction", "none", "look_ahead", "lr_discount", "delay_compensation",
    "RavnestError", "TraceError", "UnsupportedOp", "CutError", "ProgramError", "WeightsError", "WorkerLost",
    "NotFinite",
]  # fmt: skip

_HOMES = {
    "api": ("Job", "Run", "Training"),
    "runtime.corrections": ("Correction", "delay_compensation", "look_ahead", "lr_discount", "none"),
    "runtime.optimizers": ("SGD", "Adam", "AdamW", "Muon", "NAdam", "Optimizer", "constant", "cosine", "linear"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value
