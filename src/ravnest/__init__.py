"""Ravnest trains a PyTorch model that fits on none of your machines, on all of them."""

from importlib.metadata import version

from .core.errors import CutError, ProgramError, RavnestError, TraceError, UnsupportedOp, WeightsError

__version__ = version("ravnest")

__all__ = [
    "__version__",
    "RavnestError", "TraceError", "UnsupportedOp", "CutError", "ProgramError", "WeightsError",
]  # fmt: skip
