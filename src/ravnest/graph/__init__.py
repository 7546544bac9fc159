"""A model as data: trace it with its loss, cut it anywhere, ship the parts without code.

program = trace(model, loss, example_batch)      one flat list of aten calls
costs = measure_costs(program, batch=8)          FLOPs, bytes kept, bytes over every cut
stages = split(program, cuts)                    what each node gets
stage = load(dump(stages[0]))                    over the wire: JSON, checked, never code
weights = initialise(stage, seed)                or read_weights(stage, file)
tape = Tape(Runner(stage), weights, inputs)      forward; tape.backward(gradients)
"""

from .batch import Feed
from .costs import Costs, CutCost, OpCost, SavedStorage, measure_costs
from .limits import Limits
from .ops import ALLOWED, FAMILIES, Family
from .program import Init, Op, Program, Stage, State, Value
from .run import Runner
from .split import Cutter, legal_cuts, split
from .tape import Tape
from .trace import trace
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
