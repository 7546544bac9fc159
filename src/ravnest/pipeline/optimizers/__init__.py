"""Optimizers and learning-rate schedules as plain data, and the `Stepper` that applies them in a stage."""

from ravnest.pipeline.optimizers.arithmetic import (
    check_keys,
    embeddings,
    is_counter,
    is_elementwise,
    most_basis_bytes,
    on_device,
    optimizer_of,
    state_by_parameter,
    state_bytes_per_parameter,
    state_keys,
    state_shape,
    torch_optimizer,
)
from ravnest.pipeline.optimizers.schedule import LRSchedule, constant, cosine, linear
from ravnest.pipeline.optimizers.settings import LAMB, SGD, SOAP, Adam, AdamW, Muon, NAdam, Optimizer
from ravnest.pipeline.optimizers.stepper import Stepper

__all__ = [
    "Optimizer",
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "Muon",
    "SOAP",
    "LAMB",
    "LRSchedule",
    "constant",
    "cosine",
    "linear",
    "Stepper",
    "check_keys",
    "embeddings",
    "is_counter",
    "is_elementwise",
    "most_basis_bytes",
    "on_device",
    "optimizer_of",
    "state_by_parameter",
    "state_bytes_per_parameter",
    "state_keys",
    "state_shape",
    "torch_optimizer",
]
