"""Verification of a traced program against the user's own model, on one real microbatch, before the first step.

Both compute the loss, the gradients of all parameters and the new values of all buffers, from the same weights and with
the same random numbers:

    the model      loss(model(inputs), targets).backward() in plain PyTorch
    the program    cut into stages, encoded and decoded as for a worker, each run forward and back

A difference beyond rounding means that the program trains something else than the user wrote. Some constructs cannot be
traced: a backward pass of the model's own that draws random numbers or calls autograd, Python's own random numbers.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction, CrossMapLRN2d
from torch.utils.checkpoint import CheckpointFunction

from ravnest.errors import TraceError
from ravnest.graph.comparison import (
    StepResult,
    are_equal,
    differ,
    differences,
    largest_difference,
    relative_difference,
)
from ravnest.graph.cut import Cutter
from ravnest.graph.interpreter import Interpreter, Tape
from ravnest.graph.lazy import has_lazy
from ravnest.graph.limits import StageLimits
from ravnest.graph.microbatch_effect import SplitBatch
from ravnest.graph.pretrained import Pretrained
from ravnest.graph.program import Program, Stage, StateSpec
from ravnest.graph.python_state import python_state
from ravnest.graph.serialization import dump, load
from ravnest.graph.tensor_files import TensorFiles
from ravnest.graph.tracer import Loss, LossModule, first_forward, training_mode
from ravnest.graph.weights import initialise, start_tensors

__all__ = ["Verification", "verify"]

_EXACT = (CheckpointFunction, BackwardHookFunction, CrossMapLRN2d)  # of torch's autograd functions
_NUM_STAGES = 3
_SEED = 20_240_101
_NO_LIMIT = 1 << 50
_REPEATABLE = 1e-5  # difference of two losses from the same numbers: other random numbers change it by more
_PYTHON_RANDOM = "the forward pass uses random numbers of Python or NumPy, which are fixed when it is traced"
_UNKNOWN = "code that behaves differently when it is traced"
_REMEDY = "Replace it, or turn this check off with verify=False if the difference is intended"


@dataclass(frozen=True)
class Verification:
    """The result of a verification that found no difference beyond rounding."""

    is_exact: bool  # equal to the last bit
    largest_difference: float  # of a gradient, relative to that gradient's largest element
    loss: float
    batch_effect: float = 0.0  # how far the loss of two microbatches is from the mean of theirs, relatively
    gradient_effect: float = 0.0  # the same of gradients, if the model has backward passes of its own


def verify(
    program: Program,
    model: Any,
    loss: Loss | nn.Module | None,
    leaves: Sequence[Tensor],
    *,
    seed: int,
    second: Sequence[Tensor] | None = None,
    weights: tuple[float, float] | None = None,
    folder: Path | None = None,
) -> Verification:
    """Compare the program with the model that it was traced from.

    Args:
        program: The program.
        model: The module, the function that builds it, or that function and a folder of weights.
        loss: As for `trace`.
        leaves: The tensors of one microbatch, in the program's order.
        seed: The seed of the initial weights, if `model` is a function.
        second: Another microbatch, to find out whether the loss of a batch is the mean of its microbatches' losses.
        weights: The weights of both microbatches in that mean. Default: their samples.
        folder: Keep weights and gradients in unnamed files of this directory. Default: in memory.

    Raises:
        TraceError: if the program would train something else; the message names the parameter and the likely cause.
    """
    is_built = not isinstance(model, nn.Module)
    files = None if folder is None else TensorFiles(folder)
    with _restored_generators():
        if is_built:
            torch.manual_seed(seed)
            with files or nullcontext():
                model = (model.builder if isinstance(model, Pretrained) else model)()
        stages = _stages(program, leaves)
        module = LossModule(model, loss, program.feed.structure, lambda labels: None)
        with files or nullcontext():
            if has_lazy(module):
                first_forward(module, leaves)
            own = _named_tensors(module)
            if program.pretrained is not None:
                state = _loaded_state(program, own, seed)
            elif is_built:
                state = _initial_state(program, stages, seed)
                _check_initial(state, own)
            else:
                state = _shared_state(program.state, program.tensors)
        expected = _run_model(module, leaves, files)
        with files.gradients_of(state.values()) if files else nullcontext(), _failures("the traced program"):
            actual = _run_stages(program, stages, state, leaves)
        result = _compare(program, expected, actual, module, leaves)
        _check_repeatable(module, leaves, expected, backward=any(op.backward for op in program.ops))
        if second is None:
            return result
        sizes = weights or (program.feed.size_of(leaves), program.feed.size_of(second))
        if not all(sizes):  # a microbatch without weight is not trained
            return result
        shares = sizes[0] / sum(sizes), sizes[1] / sum(sizes)
        split = SplitBatch(program, stages, state, leaves, second, shares)
        with files or nullcontext():
            return replace(result, batch_effect=split.loss_effect(), gradient_effect=split.gradient_effect())


def _copies(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Copies of a batch's tensors, which the model may write to; those that share memory share it as before."""
    shared: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for leaf in leaves:
        shared[leaf.untyped_storage().data_ptr(), leaf.dtype].append(leaf)
    copied: dict[int, Tensor] = {}
    for group in shared.values():
        if len(group) == 1 or any(leaf.numel() == 0 for leaf in group):
            copied |= {id(leaf): leaf.clone() for leaf in group}
            continue
        first = min(leaf.storage_offset() for leaf in group)
        ends = [
            leaf.storage_offset() + sum((n - 1) * s for n, s in zip(leaf.shape, leaf.stride(), strict=True))
            for leaf in group
        ]
        memory = group[0].as_strided((max(ends) - first + 1,), (1,), first).clone()
        copied |= {id(t): memory.as_strided(t.size(), t.stride(), t.storage_offset() - first) for t in group}
    return [copied[id(leaf)] for leaf in leaves]


def _stages(program: Program, leaves: Sequence[Tensor]) -> list[Stage]:
    """The program in a few stages of about equal length, as a worker reads them."""
    cutter = Cutter(program)
    wanted = [len(program.ops) * i // _NUM_STAGES for i in range(1, _NUM_STAGES)]
    cuts = sorted({min(cutter.legal, key=lambda cut: abs(cut - at)) for at in wanted}) if cutter.legal else []
    samples = program.feed.size_of(leaves)
    limits = StageLimits(batch=max(2, samples), state_bytes=_NO_LIMIT, value_bytes=_NO_LIMIT)
    return [load(dump(stage), limits) for stage in cutter.split(cuts)]


def _named_tensors(module: LossModule) -> dict[str, Tensor]:
    """Parameters and buffers under the program's names."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _shared_state(specs: Iterable[StateSpec], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves that share the memory of the model's parameters, and copies of its buffers."""
    return {
        s.target: tensors[s.target].detach().requires_grad_(s.trainable)
        if s.kind == "parameter"
        else tensors[s.target].detach().clone()
        for s in specs
    }


def _loaded_state(program: Program, own: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Load the model with the values that training starts from; return leaves that share its memory."""
    constants: dict[str, Tensor] = {}
    for name, tensor in start_tensors(program, (*program.state, *program.idle), seed):
        if name in own:
            with torch.no_grad():
                own[name].copy_(tensor)
        else:
            constants[name] = tensor
    return _shared_state(program.state, {**own, **constants})


def _initial_state(program: Program, stages: Sequence[Stage], seed: int) -> dict[str, Tensor]:
    """The tensors that the stages make for themselves."""
    trainable = {s.target for s in program.state if s.trainable}
    made: dict[str, Tensor] = {}
    for stage in stages:
        made |= {name: tensor for name, tensor in initialise(stage, seed).items() if name not in made}
    return {name: tensor.detach().requires_grad_(name in trainable) for name, tensor in made.items()}


def _check_initial(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        if name in own and not are_equal(tensor.detach(), own[name].detach()):
            raise TraceError(
                f"the builder gives {name} another initial value each time, or makes it outside torch's generator; "
                "draw it with torch after torch.manual_seed, or pass the model itself instead of a builder"
            )


def _run_model(
    module: LossModule, leaves: Sequence[Tensor], files: TensorFiles | None = None, *, backward: bool = True
) -> StepResult:
    """One step of plain PyTorch; the module's gradients and buffers are as before afterwards."""
    gradients = [(p, p.grad) for p in module.parameters()]
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    python_state, numpy_state = random.getstate(), _numpy_state()
    copies = _copies(leaves)
    try:
        with training_mode(module), torch.enable_grad():
            torch.manual_seed(_SEED)
            with _failures("the model's forward pass"), _noted_seeds() as seeds:
                loss: Tensor = module(*copies)[0]
            step = StepResult(loss.detach(), cause=_cause(module, loss) or _cause_outside(leaves, copies, seeds))
            if (random.getstate(), _numpy_state()) != (python_state, numpy_state):
                step.cause = _PYTHON_RANDOM
            if loss.requires_grad and backward:
                with (
                    files.gradients_of(module.parameters()) if files else nullcontext(),
                    _failures("the model's backward pass"),
                ):
                    loss.backward()  # type: ignore[no-untyped-call]
        named = _named_tensors(module)
        step.gradients = {
            n: p.grad.to_dense() for n, p in named.items() if isinstance(p, nn.Parameter) and p.grad is not None
        }
        step.buffers = {n: b.detach().clone() for n, b in named.items() if not isinstance(b, nn.Parameter)}
        return step
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _check_repeatable(module: LossModule, leaves: Sequence[Tensor], first: StepResult, *, backward: bool) -> None:
    """Reject a model that changes itself: a program would repeat the first step for ever.

    With `backward` the step is repeated with its backward pass, whose functions may keep state too.
    """
    before = python_state(module)
    second = _run_model(module, leaves, backward=backward)
    if relative_difference(first.loss, second.loss) > _REPEATABLE and not are_equal(first.loss, second.loss):
        raise TraceError(
            "the model gives another loss the second time, for the same microbatch and random numbers: its forward "
            "pass changes the model (a counter, a cache, layers that it replaces), which a traced program cannot do. "
            "Keep such state in buffers, or run the model once before training if only its first forward pass differs"
        )
    after = python_state(module)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed:
        values = f"{before.get(changed[0], 'not there')} after one step, {after.get(changed[0], 'not there')} after two"
        raise TraceError(
            f"the model changes outside its buffers when it runs: {changed[0]} is {values:.200}, for the same "
            "microbatch and random numbers. A traced program cannot do that: keep it in a buffer, remove it if it only "
            "counts or logs, or turn this check off with verify=False if it never changes what is trained"
        )


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """Any exception here is raised by the user's model, or by what was traced of it."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"{what} fails on one of the first batches: {type(error).__name__}: {error}") from error


def _run_stages(
    program: Program, stages: Sequence[Stage], state: Mapping[str, Tensor], leaves: Sequence[Tensor]
) -> StepResult:
    torch.manual_seed(_SEED)
    values: dict[str, Any] = {v.name: leaf for v, leaf in zip(program.inputs, leaves, strict=True)}
    tapes: list[Tape] = []
    for stage in stages:
        tapes.append(Tape(Interpreter(stage), state, [values[v.name] for v in stage.inputs]))
        values |= {v.name: output for v, output in zip(stage.outputs, tapes[-1].outputs, strict=True)}
    step = StepResult(tapes[-1].outputs[0])
    gradients: dict[str, Tensor | None] | None = None
    for stage, tape in zip(reversed(stages), reversed(tapes), strict=True):
        given = None if gradients is None else [gradients.get(v.name) for v in stage.outputs]
        of_inputs = tape.backward(given)
        gradients = {v.name: g for v, g in zip(stage.inputs, of_inputs, strict=True)}
    step.gradients = {n: t.grad for n, t in state.items() if t.grad is not None}
    step.buffers = {
        s.target: state[s.target].detach() for s in program.state if s.kind == "buffer" and s.target in state
    }
    return step


def _compare(
    program: Program, expected: StepResult, actual: StepResult, module: LossModule, leaves: Sequence[Tensor]
) -> Verification:
    """Raise `TraceError` for the first difference beyond rounding."""
    if expected.cause == _PYTHON_RANDOM:
        raise TraceError(f"{expected.cause}. Use torch's random numbers")
    found = dict(differences(expected, actual, program.ties))
    if not found:
        largest = largest_difference(expected, actual)
        is_exact = largest == 0.0 and are_equal(expected.loss, actual.loss)
        return Verification(is_exact, largest, float(expected.loss))
    untraced = "; ".join(program.untraced)
    cause = untraced or expected.cause or _instability(expected, _run_model(module, leaves))
    text = next(iter(found.values()))
    more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
    raise TraceError(
        f"the traced program does not train as the model does: {text}{more}. "
        f"Likely cause: {cause or _UNKNOWN}. {_REMEDY}"
    )


def _instability(first: StepResult, second: StepResult) -> str:
    """The cause, if the model itself gives different results for the same microbatch."""
    if differ(first.loss, second.loss):
        return "the model gives another result each time: it keeps state, or uses random numbers outside torch"
    return ""


def _cause(module: nn.Module, loss: Tensor) -> str:
    """A construct in the model that changes gradients and is not traced."""
    for name, part in module.named_modules():
        if part._backward_hooks and not part._is_full_backward_hook:
            return (
                f"the backward hook of the module {name.removeprefix('model.') or 'itself'}; "
                "register_full_backward_hook works"
            )
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            return (
                f"the hook of the parameter {name.removeprefix('model.')} that runs after its gradient is accumulated; "
                "register_hook works"
            )
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        own = getattr(node, "_forward_cls", None)
        if own is not None and own.__module__.startswith("torch.") and own not in _EXACT:
            return f"the autograd function {own.__name__} of torch, whose backward pass is not traced"
        waiting.extend(following for following, _ in node.next_functions)
    return ""


def _cause_outside(leaves: Sequence[Tensor], copies: Sequence[Tensor], seeds: Sequence[object]) -> str:
    """A construct in the forward pass that a program cannot repeat."""
    memories = [leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.numel()]
    if seeds:
        return "the forward pass calls torch.manual_seed, and a program draws all random numbers from one generator"
    if len(set(memories)) < len(memories) and any(
        not are_equal(a, b) for a, b in zip(leaves, copies, strict=True)
    ):  # fmt: skip
        return (
            "the forward pass writes to a tensor of the batch that shares its memory with another one; clone it in the "
            "collator or before the write"
        )
    return ""


@contextmanager
def _noted_seeds() -> Iterator[list[object]]:
    """Note the seeds that the forward pass sets."""
    seeds: list[object] = []
    original = torch.manual_seed

    def noting(seed: Any) -> Any:
        seeds.append(seed)
        return original(seed)

    torch.manual_seed = noting
    try:
        yield seeds
    finally:
        torch.manual_seed = original


def _numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return (kind, np.asarray(keys).tobytes(), *rest)


@contextmanager
def _restored_generators() -> Iterator[None]:
    """Leave all random generators as they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
