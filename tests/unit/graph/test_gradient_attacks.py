"""Malicious backward passes in stage files: each is rejected with an error that names the location."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ravnest.errors import ProgramError
from ravnest.graph import StageLimits, dump, load, split, trace
from ravnest.graph.ops import ALLOWED
from ravnest.graph.validate import MAX_LIST
from tests.unit.graph.custom_gradients import FUNCTIONS

Change = Callable[[dict[str, Any], dict[str, Any]], Any]  # of the op with a backward pass, in its file


@cache
def good_gradient() -> bytes:
    program = trace(FUNCTIONS["several inputs"], F.mse_loss, (torch.ones(3, 4), torch.ones(3, 1)))
    return dump(split(program, [])[0])


def of_backward(**fields: Any) -> Change:
    return lambda op, file: op["backward"].update(fields)


def inner(name: str, *args: Any, outs: tuple[str, ...] = ("evil",), **more: Any) -> Change:
    """Append an op to the backward pass."""
    return lambda op, file: op["backward"]["ops"].append({"op": name, "outs": list(outs), "args": list(args), **more})


def first_result(op: dict[str, Any], name: str) -> None:
    op["backward"]["results"][0] = name


def both(*changes: Change) -> Change:
    return lambda op, file: [change(op, file) for change in changes]


def nested_pass(op: dict[str, Any], file: dict[str, Any]) -> None:
    op["backward"]["ops"].append({**copy.deepcopy(op), "outs": ["evil"]})


def deep(op: dict[str, Any], file: dict[str, Any]) -> None:
    level: dict[str, Any] = {"gradients": ["g0"]}
    for _ in range(200):
        level = {"gradients": ["g0"], "ops": [{"op": "ravnest.with_gradient", "outs": ["a"], "backward": level}]}
    op["backward"] = level


def another_op(op: dict[str, Any], file: dict[str, Any]) -> None:
    file["ops"][0]["backward"] = op["backward"]


def in_init(op: dict[str, Any], file: dict[str, Any]) -> None:
    file["init"]["ops"][0]["backward"] = op["backward"]


ATTACKS: dict[str, tuple[Change, str]] = {
    "forbidden op": (inner("aten.from_file.default", "=/etc/passwd"), r"backward op \d+ \(aten.*not on the list"),
    "unknown op": (inner("aten.nonsense.default", "%g0"), "not on the list"),
    "python": (inner("builtins.exec.default", "=import os"), "not on the list"),
    "init op": (inner("aten.normal_.default", "%g0", 0.0, 1.0), "not on the list|random"),
    "marker": (inner("ravnest.hook.default", "%g0"), "not on the list"),
    "random numbers": (inner("aten.rand_like.default", "%g0"), "may not draw random numbers"),
    "nested backward pass": (nested_pass, "may not have a backward pass of its own"),
    "nested op without one": (inner("ravnest.with_gradient", ["%g0"], ["%g0"], []), "not on the list"),
    "deep nesting": (deep, "stage file|backward pass"),
    "backward pass of another op": (another_op, "may not have a backward pass of its own"),
    "backward pass in the init list": (in_init, "an init op may not have a backward pass"),
    "no backward pass": (lambda op, file: op.pop("backward"), "three lists"),
    "value of the forward pass": (inner("aten.relu.default", "%inputs"), "which no earlier op defines"),
    "parameter": (inner("aten.relu.default", "%s0"), "which no earlier op defines"),
    "reference to itself": (inner("aten.relu.default", "%evil"), "which no earlier op defines"),
    "name used twice": (inner("aten.relu.default", "%g0", outs=("g0",)), "used twice"),
    "strange name": (inner("aten.relu.default", "%g0", outs=("a b",)), "not a valid name"),
    "saved name of a gradient": (lambda op, file: op["backward"]["saved"].__setitem__(0, "g0"), "used twice"),
    "write to a gradient": (inner("aten.mul_.Scalar", "%g0", 2.0), "may not be written"),
    "write to a saved value": (inner("aten.zero_.default", "%a0"), "may not be written"),
    "write through a view": (
        both(inner("aten.detach.default", "%a0", outs=("w",)), inner("aten.zero_.default", "%w")),
        "may not be written",
    ),
    "write through einsum": (
        both(inner("aten.einsum.default", "=ij->ij", ["%a0"], outs=("w",)), inner("aten.zero_.default", "%w")),
        "may not be written|did not make",
    ),
    "huge tensor": (inner("aten.zeros.default", [10**12]), "the limit is"),
    "many big tensors": (
        lambda op, file: [inner("aten.zeros.default", [10**8], outs=(f"e{i}",))(op, file) for i in range(1000)],
        "exceed",
    ),
    "number for a tensor": (inner("aten.relu.default", 1), "is not a Tensor"),
    "unknown result": (lambda op, file: first_result(op, "nothing"), "which is not a tensor of it"),
    "gradient of another shape": (
        both(inner("aten.zeros.default", [7, 7]), lambda op, file: first_result(op, "evil")),
        r"the gradient of an input is float32 \(7, 7\)",
    ),
    "gradient that broadcasts": (
        both(inner("aten.zeros.default", [1]), lambda op, file: first_result(op, "evil")),
        "the gradient of an input is",
    ),
    "gradient of another dtype": (
        both(inner("aten.to.dtype", "%g0", "$float64"), lambda op, file: first_result(op, "evil")),
        "the gradient of an input is float64",
    ),
    "too few results": (lambda op, file: op["backward"]["results"].pop(), "other numbers of"),
    "too many gradients": (of_backward(gradients=["g0", "g1"]), "other numbers of"),
    "too few saved values": (lambda op, file: op["backward"]["saved"].pop(), "other numbers of"),
    "too many outs": (lambda op, file: op["outs"].append("evil"), "other numbers of"),
    "no outputs": (lambda op, file: op.update(outs=[], args=[[], *op["args"][1:]]), "other numbers of"),
    "two lists": (lambda op, file: op["args"].pop(), "three lists"),
    "keyword": (lambda op, file: op.update(kwargs={"x": 1}), "three lists"),
    "constant as an output": (lambda op, file: op["args"][0].__setitem__(0, 1), "not a value that an earlier op"),
    "later value as an input": (lambda op, file: op["args"][1].__setitem__(0, "%loss"), "an earlier op"),
    "integers as an output": (
        lambda op, file: [
            file["ops"].insert(0, {"op": "aten.argmax.default", "outs": ["ids"], "args": ["%inputs"]}),
            op["args"][0].__setitem__(0, "%ids"),
        ],
        "floating-point",
    ),
    "giant list": (
        lambda op, file: [
            op["args"][2].extend(["%inputs"] * MAX_LIST),
            op["backward"]["saved"].extend(f"b{i}" for i in range(MAX_LIST)),
        ],
        "at most 4096",
    ),
    "unknown field": (of_backward(code="import os"), "unknown field"),
}  # fmt: skip


def with_gradient(file: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(op for op in file["ops"] if op["op"] == "ravnest.with_gradient")
    return found


def test_the_unchanged_file_is_valid() -> None:
    assert dump(load(good_gradient())) == good_gradient()
    assert "ravnest.with_gradient" not in ALLOWED


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name: str) -> None:
    change, message = ATTACKS[name]
    file = json.loads(good_gradient())
    change(with_gradient(file), file)
    with pytest.raises(ProgramError, match=message):
        load(json.dumps(file).encode())


def test_endless_nesting() -> None:
    deep = b'{"ops":[{"op":"ravnest.with_gradient","outs":[],"backward":' * 100_000
    with pytest.raises(ProgramError, match="stage file"):
        load(deep)


def test_ops_of_backward_passes_count() -> None:
    file = json.loads(good_gradient())
    count = len(file["ops"]) + len(with_gradient(file)["backward"]["ops"])
    load(good_gradient(), StageLimits(ops=count))
    with pytest.raises(ProgramError, match=f"{count} ops, at most {count - 1}"):
        load(good_gradient(), StageLimits(ops=count - 1))
