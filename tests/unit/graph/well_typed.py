"""Random stages of one allowed op, with arguments of the right types and arbitrary values."""

from __future__ import annotations

import random
from typing import Any

from ravnest.graph import ALLOWED, Op, Stage, Value
from ravnest.graph.validate import declared_arguments

INPUTS = (
    Value("x", "float32", ((1, 0), 4), grad=True), Value("y", "float32", (4, 4), grad=True),
    Value("row", "float32", (4,)), Value("image", "float32", ((1, 0), 2, 8, 8), grad=True),
    Value("kernel", "float32", (2, 2, 3, 3)), Value("ids", "int64", ((1, 0), 4)), Value("mask", "bool", ((1, 0), 4)),
    Value("one", "float32", ()), Value("none", "float32", (0, 4)), Value("count", "int", number=(1, 0)),
)  # fmt: skip
_TENSORS = [f"%{v.name}" for v in INPUTS if v.number is None]
_INTS = [0, 1, 2, 3, -1, -2, 4, 8, 100, -100, 10**6, 2**31, 2**62, -(2**62), "%count"]
_FLOATS = [0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, "#inf", "#-inf", 3]
_TEXTS = [
    "=none",
    "=tanh",
    "=mean",
    "=constant",
    "=reflect",
    "=floor",
    "=trunc",
    "=same",
    "=valid",
    "=ij",
    "=ij,jk->ik",
    "=x",
]


def stage_of(name: str, rng: random.Random) -> Stage:
    args, kwargs = [], {}
    for argument in declared_arguments(name):
        if argument.optional and rng.random() < 0.5:
            if argument.by_name:
                continue
            if rng.random() < 0.5:
                break
        made = value_for(argument.type, rng)
        if argument.by_name:
            kwargs[argument.name] = made
        else:
            args.append(made)
    outs = tuple(f"r{i}" for i in range(rng.choice([1, 1, 1, 2, 3])))
    op = Op(name, outs, tuple(args), kwargs)
    return Stage(index=0, count=1, inputs=INPUTS, outputs=(), state=(), ops=(op,))


def value_for(declared: str, rng: random.Random) -> Any:
    if declared.startswith("Optional["):
        return None if rng.random() < 0.3 else value_for(declared[9:-1], rng)
    if declared.startswith("List["):
        return tuple(value_for(declared[5:-1], rng) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4])))
    match declared:
        case "Tensor":
            return rng.choice(_TENSORS)
        case "int" | "SymInt":
            return rng.choice(_INTS)
        case "float" | "number" | "Scalar":
            return rng.choice(_FLOATS)
        case "bool":
            return rng.random() < 0.5
        case "str":
            return rng.choice(_TEXTS)
        case "ScalarType":
            return rng.choice(["$float32", "$float64", "$int64", "$bool", "$bfloat16", "$complex64", "$uint8"])
        case "Device":
            return "@"
        case "MemoryFormat":
            return rng.choice(["~contiguous_format", "~channels_last", "~preserve_format"])
        case _:
            return None


def any_stage(rng: random.Random) -> Stage:
    return stage_of(rng.choice(list(ALLOWED)), rng)
