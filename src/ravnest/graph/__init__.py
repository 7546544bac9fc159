"""Models as data: trace a model with its loss, cut it anywhere, send the stages without code.

    program = trace(model, loss, example_batch)      a flat list of aten calls
    costs = measure_costs(program, batch=8)          FLOPs, saved bytes, bytes over every cut
    stages = split(program, cuts)                    one stage per node
    stage = load(dump(stages[0]))                    JSON, validated, never code
    weights = initialise(stage, seed)                or read_weights(stage, file)
    tape = Tape(Interpreter(stage), weights, inputs) forward; tape.backward(gradients)

Names are imported on first use: a node that only runs stages does not import the tracer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ravnest.graph.batch import BatchLayout
    from ravnest.graph.costs import Costs, CutCost, OpCost, SavedStorage, measure_costs
    from ravnest.graph.cut import Cutter, legal_cuts, split
    from ravnest.graph.interpreter import Interpreter, Tape
    from ravnest.graph.limits import StageLimits
    from ravnest.graph.ops import ALLOWED, FAMILIES, Family
    from ravnest.graph.program import Init, Op, Program, Stage, StateSpec, Value
    from ravnest.graph.serialization import dump, load
    from ravnest.graph.tracer import trace
    from ravnest.graph.weights import WeightsWriter, initialise, read_weights, stage_weights, write_weights

__all__ = [
    "trace", "Program", "BatchLayout",
    "measure_costs", "Costs", "CutCost", "OpCost", "SavedStorage",
    "split", "legal_cuts", "Cutter", "Stage", "StateSpec", "Value", "Op", "Init",
    "dump", "load", "StageLimits", "ALLOWED", "FAMILIES", "Family",
    "initialise", "read_weights", "stage_weights", "write_weights", "WeightsWriter",
    "Interpreter", "Tape",
]  # fmt: skip

_MODULES = {
    "batch": ("BatchLayout",),
    "costs": ("Costs", "CutCost", "OpCost", "SavedStorage", "measure_costs"),
    "limits": ("StageLimits",),
    "ops": ("ALLOWED", "FAMILIES", "Family"),
    "program": ("Init", "Op", "Program", "Stage", "StateSpec", "Value"),
    "interpreter": ("Interpreter", "Tape"),
    "cut": ("Cutter", "legal_cuts", "split"),
    "tracer": ("trace",),
    "weights": ("WeightsWriter", "initialise", "read_weights", "stage_weights", "write_weights"),
    "serialization": ("dump", "load"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value
