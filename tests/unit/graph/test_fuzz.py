"""Thousands of damaged stage files: `load` raises `ProgramError` or returns a stage equal to the file's content.

An audit hook checks that loading opens no file, starts no process and imports no module. Stages that are still valid
are run with little memory: they may fail, but must not crash.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import zoo
from ravnest.errors import ProgramError
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.graph import ALLOWED, Interpreter, Stage, StageLimits, dump, load, split, trace
from ravnest.graph.program import DTYPES, resolve_dim
from tests.unit.graph.test_attacks import good
from tests.unit.graph.test_gradient_attacks import good_gradient
from tests.unit.graph.well_typed import any_stage

LIMITS = StageLimits(batch=3, value_bytes=4 * 2**20, total_bytes=64 * 2**20, state_bytes=4 * 2**20)
CASES = 700  # of each of the four kinds of damage below


@cache
def bases() -> tuple[bytes, ...]:
    """Valid files to start from: of a GPT with init lists, of a CNN, with sizes and writes, with a backward pass."""
    config = GPTConfig(vocab=16, context=8, layers=1, width=16, heads=2)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    gpt = trace(lambda: GPT(config), next_token_loss, (ids, ids))
    digits = zoo.digits()
    cnn = trace(digits.build, digits.loss, digits.batch(2))
    return (*map(dump, split(gpt, [14])), *map(dump, split(cnn, [8])), good(), good_gradient())


@st.composite
def damaged_json(draw: st.DrawFn) -> bytes:
    """One to three entries of the JSON replaced, removed, repeated or moved."""
    rng = random.Random(draw(st.integers(0, 2**48)))
    file = json.loads(rng.choice(bases()))
    for _ in range(rng.randint(1, 3)):
        damage(file, rng)
    return json.dumps(file).encode()


def damage(file: Any, rng: random.Random) -> None:
    place = file
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.85:
            place = place[key]
            continue
        break
    match rng.randint(0, 5):
        case 0:
            del place[key]
        case 1 if isinstance(place, list):
            place.insert(rng.choice(keys), place[key])
        case 2:
            place[key], place[rng.choice(keys)] = place[rng.choice(keys)], place[key]
        case _:
            place[key] = replacement(place[key], rng)


def replacement(old: Any, rng: random.Random) -> Any:
    """Another value, usually of the same type."""
    numbers = [0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**48, 2**63 - 1, -(2**63), 2**64, 1e12]
    if isinstance(old, str) and rng.random() < 0.8:
        texts = ["%v1", "%v2", "%s1", "%inputs", "$int64", "@", "=x", "~channels_last", "#-inf", "", "%", "loss"]
        return rng.choice([*texts, old + "x", old[:-1], "aten.sym_size.int", "sym.mul", rng.choice(list(ALLOWED))])
    if isinstance(old, bool) or old is None:
        return rng.choice([True, False, None, 1])
    if isinstance(old, int | float) and rng.random() < 0.9:
        return rng.choice([*numbers, old + 1, -old, old * 1000])
    return rng.choice([*numbers, 0.5, -0.0, 1e308, None, True, "", "%v1", [], {}, [1] * 40, [["a"]], [None], {"a": 1}])


@st.composite
def damaged_bytes(draw: st.DrawFn) -> bytes:
    """Bits flipped; ranges removed, repeated or replaced."""
    rng = random.Random(draw(st.integers(0, 2**48)))
    data = bytearray(rng.choice(bases()))
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(data)), rng.randint(1, 30)
        match rng.randint(0, 3):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[at : at + length]
            case _:
                data[at : at + length] = rng.randbytes(length)
        data = data or bytearray(b"x")
    return bytes(data)


@st.composite
def other_ops(draw: st.DrawFn) -> bytes:
    """A valid file with ops replaced by other allowed ones, or with other numbers: likely to be accepted."""
    rng = random.Random(draw(st.integers(0, 2**48)))
    file = json.loads(rng.choice(bases()))
    for _ in range(rng.randint(1, 2)):
        op = rng.choice(file["ops"])
        if rng.random() < 0.5:
            op["op"] = rng.choice([*ALLOWED, "sym.add"])
        for i, arg in enumerate(op["args"]):
            if rng.random() < 0.4:
                op["args"][i] = replacement(arg, rng)
    return json.dumps(file).encode()


_forbidden: list[str] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _forbidden is not None and event.split(".")[0] in (
        "open",
        "os",
        "subprocess",
        "socket",
        "shutil",
        "exec",
        "import",
    ):
        _forbidden.append(f"{event} {args!r:.200}")


sys.addaudithook(_audit)


@contextmanager
def nothing_touched() -> Iterator[None]:
    """Fails if the block opens a file, starts a process, imports a module or executes a string."""
    global _forbidden
    _forbidden = []
    try:
        yield
        touched = _forbidden
    finally:
        _forbidden = None
    assert touched == []


def try_load(data: bytes) -> Stage | None:
    with nothing_touched():
        try:
            stage = load(data, LIMITS)
        except ProgramError:
            return None
    assert msgspec.json.decode(dump(stage), type=Stage) == msgspec.json.decode(data, type=Stage)
    return stage


def run(stage: Stage) -> None:
    """Run an accepted stage on zeros. It may raise an error; it must not crash."""
    state = {s.target: torch.zeros(s.shape, dtype=DTYPES[s.dtype]).requires_grad_(s.trainable) for s in stage.state}
    inputs = [
        resolve_dim(v.number, 3)
        if v.number is not None
        else torch.zeros([resolve_dim(d, 3) for d in v.shape], dtype=DTYPES[v.dtype])
        for v in stage.inputs
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outputs = Interpreter(stage)(state, inputs)
            for output in outputs:
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        except (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError):
            pass


@pytest.fixture(autouse=True, scope="module")
def bounded_memory() -> Iterator[None]:
    for base in bases():  # import everything before memory is watched
        assert load(base, LIMITS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000, "kilobytes at the peak"


# Deterministic: a rare case whose operation needs gigabytes internally must not fail a build at random.
fuzz = settings(
    max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)


@fuzz
@given(data=damaged_json())
def test_damaged_json(data: bytes) -> None:
    if stage := try_load(data):
        run(stage)


@fuzz
@given(data=damaged_bytes())
def test_damaged_bytes(data: bytes) -> None:
    if stage := try_load(data):
        run(stage)


@fuzz
@given(seed=st.integers(0, 2**48))
def test_well_typed_calls(seed: int) -> None:
    if stage := try_load(dump(any_stage(random.Random(seed)))):
        run(stage)


@fuzz
@given(data=other_ops())
def test_other_ops(data: bytes) -> None:
    if stage := try_load(data):
        run(stage)
