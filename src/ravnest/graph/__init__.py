"""A model as data: trace it with its loss, cut it anywhere, ship the parts without code.

    program = trace(model, loss, example_batch)      one flat list of aten calls
    costs = measure_costs(program, batch=8)          FLOPs, bytes kept, bytes over every cut
    stages = split(program, cuts)                    what each node gets
    stage = load(dump(stages[0]))                    over the wire: JSON, checked, never code
    weights = initialise(stage, seed)                or read_weights(stage, file)
    tape = Tape(Runner(stage), weights, inputs)      forward; tape.backward(gradients)

A node that only runs stages does not import what tracing needs: names are looked up when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import Feed
    from .costs import Costs, CutCost, OpCost, SavedStorage, measure_costs
    from .cut import Cutter, legal_cuts, split
    from .limits import Limits
    from .ops import ALLOWED, FAMILIES, Family
    from .program import Init, Op, Program, Stage, State, Value
    from .run import Runner
    from .tape import Tape
    from .tracing import trace
    from .weights import WeightsWriter, initialise, read_weights, stage_weights, write_weights
    from .wire import dump, load

__all__ = [
    "trace", "Program", "Feed",
    "measure_costs", "Costs", "CutCost", "OpCost", "SavedStorage",
    "split", "legal_cuts", "Cutter", "Stage", "State", "Value", "Op", "Init",
    "dump", "load", "Limits", "ALLOWED", "FAMILIES", "Family",
    "initialise", "read_weights", "stage_weights", "write_weights", "WeightsWriter",
    "Runner", "Tape",
]  # fmt: skip

_HOMES = {
    "batch": ("Feed",),
    "costs": ("Costs", "CutCost", "OpCost", "SavedStorage", "measure_costs"),
    "limits": ("Limits",),
    "ops": ("ALLOWED", "FAMILIES", "Family"),
    "program": ("Init", "Op", "Program", "Stage", "State", "Value"),
    "run": ("Runner",),
    "cut": ("Cutter", "legal_cuts", "split"),
    "tape": ("Tape",),
    "tracing": ("trace",),
    "weights": ("WeightsWriter", "initialise", "read_weights", "stage_weights", "write_weights"),
    "wire": ("dump", "load"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value
