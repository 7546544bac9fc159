"""Malicious stage files: each is rejected with an error that names the location."""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ravnest.errors import ProgramError
from ravnest.graph import StageLimits, dump, load, split, trace
from ravnest.graph.ops import ALLOWED
from ravnest.graph.validate import Declared, _check_argument, declared_arguments


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x))
        y = h.view(h.shape[0], 2, 2).transpose(1, 2).reshape(h.shape[0], 4)
        return (F.gelu(y) * self.scale).sum(1)  # type: ignore[operator]


@cache
def good() -> bytes:
    program = trace(Small, F.mse_loss, (torch.ones(3, 4), torch.ones(3)))
    return dump(split(program, [])[0])


def ops(file: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(op for op in file["ops"] if op["op"] == name)
    return found


def at(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Change one entry of the file."""

    def change(file: dict[str, Any]) -> None:
        place: Any = file
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


def add(op: str, *args: Any, outs: tuple[str, ...] = ("evil",), **kwargs: Any) -> Callable[[dict[str, Any]], None]:
    """Append an op."""
    return lambda file: file["ops"].append({"op": op, "outs": list(outs), "args": list(args), "kwargs": kwargs})


def view_size(*size: Any) -> Callable[[dict[str, Any]], None]:
    def change(file: dict[str, Any]) -> None:
        ops(file, "aten.reshape.default")["args"][1] = list(size)

    return change


def nested(file: dict[str, Any]) -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    file["ops"][0]["args"] = deep


X = "%inputs"
ATTACKS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "unknown op": (add("aten.nonsense.default", X), r"op \d+ \(aten.nonsense.default -> evil\).*not on the list"),
    "op that reads files": (add("aten.from_file.default", "=/etc/passwd"), "not on the list"),
    "storage op": (add("aten.set_.source_Tensor", X, X), "not on the list"),
    "resizing": (add("aten.resize_.default", X, [10]), "not on the list"),
    "uninitialised memory": (add("aten.empty.memory_format", [10]), "not on the list"),
    "strides": (add("aten.as_strided.default", X, [100], [1]), "not on the list"),
    "private op": (add("aten._to_copy.default", X), "not on the list"),
    "python": (add("builtins.exec.default", "=import os"), "not on the list"),
    "dunder": (add("aten.__class__.default", X), "not on the list"),
    "custom namespace": (add("torchvision.nms.default", X, X, 0.5), "not on the list"),
    "higher order": (add("higher_order.cond", X), "not on the list"),
    "init op as op": (add("aten.normal_.default", X, 0.0, 1.0), "not on the list"),
    "huge tensor": (add("aten.zeros.default", [10**12]), "the limit is"),
    "huge by product": (add("aten.zeros.default", [10**9, 10**9, 10**9, 10**9]), "evil"),
    "huge arange": (add("aten.arange.default", 10**15), "the limit is|evil"),
    "huge repeat": (add("aten.repeat.default", X, [10**6, 10**6]), "the limit is|evil"),
    "huge padding": (add("aten.constant_pad_nd.default", X, [0, 10**13], 0.0), "the limit is|evil"),
    "huge one hot": (add("aten.one_hot.default", "%inputs", 10**12), "evil|at most"),
    "many big values": (
        lambda f: [add("aten.zeros.default", [10**8], outs=(f"e{i}",))(f) for i in range(1000)],
        "exceed",
    ),  # type: ignore[dict-item]
    "huge input": (at("inputs", 0, "shape", to=[10**12, 4]), "bytes in value"),
    "overflowing input": (at("inputs", 0, "shape", to=[2**62, 2**62]), "not a valid size"),
    "many dimensions": (at("inputs", 0, "shape", to=[1] * 100), "dimensions"),
    "negative input": (at("inputs", 0, "shape", to=[-4, 4]), "not a valid size"),
    "negative by batch": (at("inputs", 0, "shape", to=[[1, -100], 4]), "negative"),
    "negative size": (view_size(-5, 2, 2), "reshape"),
    "two unknown sizes": (view_size(-1, -1, 2), "reshape"),
    "string for an int": (view_size("=3", 2, 2), "argument shape"),
    "float for an int": (view_size(3.5, 2, 2), "argument shape"),
    "tensor for an int": (view_size(X, 2, 2), "argument shape"),
    "bool for an int": (view_size(True, 2, 2), "argument shape"),
    "beyond 64 bits": (view_size(2**70, 2, 2), "argument shape|stage file"),
    "string for a tensor": (at("ops", 0, "args", to=["=x", 0]), "is not a Tensor"),
    "number for a tensor": (at("ops", 0, "args", to=[1, 0]), "is not a Tensor"),
    "too many arguments": (at("ops", 0, "args", to=[X, X, X, X, X, X]), "arguments given"),
    "missing argument": (at("ops", 0, "args", to=[X]), "is missing"),
    "unknown keyword": (at("ops", 0, "kwargs", to={"out": X}), "not one of its keyword arguments"),
    "positional by name": (at("ops", 0, "kwargs", to={"bias": None}), "not one of its keyword arguments"),
    "unknown field": (at("ops", 0, "code", to="import os"), "unknown field"),
    "unknown field at the top": (at("reduce", to=["os.system", "true"]), "unknown field"),
    "unknown dtype": (add("aten.zeros.default", [2], dtype="$quint8"), "argument dtype"),
    "other device": (add("aten.zeros.default", [2], device="@cuda:1"), "argument device"),
    "device as text": (add("aten.zeros.default", [2], device="=cpu"), "argument device"),
    "sparse layout": (add("aten.zeros.default", [2], layout="=sparse_coo"), "argument layout"),
    "generator": (add("aten.bernoulli.default", X, generator="=x"), "argument generator"),
    "text with a path": (add("aten.einsum.default", "=../../etc", [X]), "argument equation"),
    "quadratic text": (add("aten.einsum.default", "=" + "a" * 10_000, [X]), "argument equation"),
    "duplicate name": (add("aten.relu.default", X, outs=("inputs",)), "used twice"),
    "strange name": (add("aten.relu.default", X, outs=("a b/../c",)), "not a valid name"),
    "long name": (add("aten.relu.default", X, outs=("a" * 10_000,)), "not a valid name"),
    "forward reference": (at("ops", 0, "args", to=["%loss", 0]), "which no earlier op defines"),
    "reference to itself": (add("aten.relu.default", "%evil"), "which no earlier op defines"),
    "wrong number of results": (add("aten.relu.default", X, outs=("a", "b")), "one result"),
    "wrong number of parts": (add("aten.split.Tensor", X, 2, outs=("a", "b", "c")), "split"),
    "output never made": (at("outputs", 0, "name", to="nothing"), "never computed"),
    "output of another shape": (at("outputs", 0, "shape", to=[7]), "is declared as"),
    "output of another dtype": (at("outputs", 0, "dtype", to="float64"), "is declared as"),
    "state twice": (lambda f: f["state"].append(dict(f["state"][0], name="again")), "is defined twice"),
    "state with a path": (at("state", 0, "target", to="../../weights"), "is not a valid name"),
    "state of 10 TB": (at("state", 0, "shape", to=[10**7, 10**6]), "bytes in"),
    "foreign state": (at("state", 0, "owner", to=7), "invalid owner"),
    "trainable integers": (at("state", 0, "dtype", to="int64"), "cannot be trained"),
    "kind": (at("state", 0, "kind", to="module"), "not a parameter or a buffer"),
    "write to a parameter": (add("aten.mul_.Scalar", "%s0", 2.0), "may not be written"),
    "write to a fixed buffer": (lambda f: add("aten.zero_.default", "%" + fixed_buffer(f))(f), "may not be written"),
    "write to a parameter through a view": (lambda f: write_through_a_view(f), "may not be written"),
    "write to a parameter through einsum": (lambda f: write_through_einsum(f), "memory of a parameter"),
    "statistics into a parameter": (lambda f: batch_norm_into(f, "%s0"), "may not be written"),
    "deep nesting": (nested, "stage file"),
    "endless arithmetic": (lambda f: grow(f), "out of range|OverflowError"),
    "division by zero": (add("sym.floordiv", 1, 0), "ZeroDivisionError"),
    "text in arithmetic": (add("sym.mul", "=a", 10**9), "not a number"),
    "tensor in arithmetic": (add("sym.mul", X, 2), "not a number"),
    "older format": (at("format", to="ravnest-stage/1"), "update the older side"),
    "stage 5 of 1": (at("index", to=5), "out of range"),
    "negative stage": (at("index", to=-1), "out of range"),
    "too many ops": (lambda f: f.update(ops=f["ops"] * 20_000), "bytes|ops"),
    "init of a stranger": (
        at("init", "ops", 0, "outs", to=["stranger"]),
        "not state of the stage|no earlier op defines",
    ),
    "init with a forbidden op": (at("init", "ops", 0, "op", to="aten.from_file.default"), "not on the list"),
    "init too big": (at("init", "ops", 0, "args", to=[[10**13]]), "at most|init op"),
    "init that writes a value": (
        at("init", "draws", to=[{"at": 0, "op": "aten.add_.Scalar", "dtype": "float32", "shape": [2], "args": [1]}]),
        "draws no random",
    ),
    "draw too big": (
        at("init", "draws", to=[{"at": 0, "op": "aten.normal_.default", "dtype": "float32", "shape": [10**12]}]),
        "bytes",
    ),
    "draw that reads": (
        at(
            "init",
            "draws",
            to=[{"at": 0, "op": "aten.normal_.default", "dtype": "float32", "shape": [2], "args": ["%i0"]}],
        ),
        "may not read values",
    ),
    "draw nowhere": (
        at("init", "draws", to=[{"at": 9999, "op": "aten.normal_.default", "dtype": "float32", "shape": [2]}]),
        "no init op",
    ),
    "zero stride": (add("aten.max_pool1d.default", X, [2], [0]), "max_pool1d"),
    "zero groups": (add("aten.group_norm.default", X, 0), "group_norm"),
    "zero chunks": (add("aten.chunk.default", X, 0, outs=("a",)), "chunk"),
    "zero split": (add("aten.split.Tensor", X, 0, outs=("a",)), "split"),
}


def fixed_buffer(file: dict[str, Any]) -> str:
    name: str = next(s["name"] for s in file["state"] if s["target"] == "scale")
    return name


def write_through_a_view(file: dict[str, Any]) -> None:
    add("aten.detach.default", "%s0", outs=("w",))(file)
    add("aten.mul_.Scalar", "%w", 2.0)(file)


def write_through_einsum(file: dict[str, Any]) -> None:
    """`ij->ij` is a view, though nothing in its signature says so."""
    weight = next(s["name"] for s in file["state"] if s["target"] == "linear.weight")
    add("aten.einsum.default", "=ij->ij", ["%" + weight], outs=("w",))(file)
    add("aten.mul_.Scalar", "%w", 2.0)(file)


def batch_norm_into(file: dict[str, Any], name: str) -> None:
    ops(file, "aten.batch_norm.default")["args"][3] = name


def grow(file: dict[str, Any]) -> None:
    """Squares a number repeatedly: 2 ** (2 ** 40) without a bound."""
    file["ops"].append({"op": "sym.add", "outs": ["n0"], "args": [1, 1]})
    for i in range(40):
        file["ops"].append({"op": "sym.mul", "outs": [f"n{i + 1}"], "args": [f"%n{i}", f"%n{i}"]})


def test_the_unchanged_file_is_valid() -> None:
    assert dump(load(good())) == good()


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name: str) -> None:
    change, message = ATTACKS[name]
    file = copy.deepcopy(json.loads(good()))
    change(file)
    with pytest.raises(ProgramError, match=message):
        load(json.dumps(file).encode())


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "1e999"])
def test_invalid_numbers(constant: str) -> None:
    text = good().decode().replace('"outs":["v0"]', f'"outs":["v0"],"kwargs":{{"x":{constant}}}', 1)
    with pytest.raises(ProgramError):
        load(text.encode())


def pickled() -> bytes:
    return pickle.dumps({"a": 1})


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("data.pkl", pickle.dumps([1]))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        pickled(),
        zipped(),
        good()[:-20],
    ],
    ids=["empty", "object", "null", "list", "bytes", "brackets", "braces", "pickle", "zip", "cut off"],
)
def test_not_a_stage_file(data: bytes) -> None:
    with pytest.raises(ProgramError):
        load(data)


def test_a_node_sets_its_own_limits() -> None:
    with pytest.raises(ProgramError, match="bytes"):
        load(good(), StageLimits(state_bytes=64))
    with pytest.raises(ProgramError, match="ops"):
        load(good(), StageLimits(ops=3))
    with pytest.raises(ProgramError, match="at most 100 are allowed"):
        load(good(), StageLimits(text_bytes=100))
    with pytest.raises(ValueError, match="batch must be an integer > 0"):
        StageLimits(batch=0)


CHOICES = [
    (op, argument)
    for op in sorted(ALLOWED)
    for argument in declared_arguments(op)
    if argument.type == "int" and argument.name in ("reduction", "mode", "interpolation_mode", "padding_mode")
]


@pytest.mark.parametrize(("op", "argument"), CHOICES, ids=[f"{op} {argument.name}" for op, argument in CHOICES])
def test_a_choice_that_torch_does_not_know_is_rejected(op: str, argument: Declared) -> None:
    """Some losses return memory that they have not written: whatever the process had there."""
    kinds = {"x": "tensor", "n": "number"}
    for value in (3, -1, 2**31, 2**62, 0.0, True, None, "%n"):
        with pytest.raises(ProgramError, match=rf"{op}: argument {argument.name} = .* must be 0, 1 or 2"):
            _check_argument(op, argument, value, kinds)
    for value in (0, 1, 2):
        _check_argument(op, argument, value, kinds)
