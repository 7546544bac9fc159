"""Records backward passes of the model's own while the model is exported.

Autograd functions, hooks on the gradients of tensors and parameters, and backward hooks of modules change gradients
without being part of the forward pass. While a `GradientRecorder` is active, their backward passes run right after
their forward passes, in the same trace, on placeholders for gradients. Markers in the exported graph delimit them:

    g = ravnest::gradient_of(y)                                     a placeholder for the gradient of y
    ...                                                             the backward pass, operations on g
    z = ravnest::custom_gradient([y], [x], [g], [gradient of x])    y, with this backward pass to x
        ravnest::hook([x], [g], [new gradient of x])                this hook on x, which `hooked` returned

`ravnest.graph.backward_extractor` takes them out of the forward pass. If one cannot be traced, autograd
differentiates the forward pass instead, and `ravnest.graph.verify` compares the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, FunctionCtx, _SingleLevelFunction
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import BackwardHook, RemovableHandle

from ravnest.errors import TraceError
from ravnest.graph.local_response_norm import LocalResponseNorm

__all__ = ["CUSTOM_GRADIENT", "GRADIENT_OF", "HOOK", "HOOKED", "GradientRecorder", "UntracedBackward"]

GRADIENT_OF = "ravnest.gradient_of.default"
CUSTOM_GRADIENT = "ravnest.custom_gradient.default"
HOOK = "ravnest.hook.default"
HOOKED = "ravnest.hooked.default"

_library = torch.library.Library("ravnest", "DEF")  # type: ignore[no-untyped-call]


def _like(tensor: Tensor, *args: Any) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _all_like(tensors: Sequence[Tensor], *args: Any) -> list[Tensor]:
    return [_like(tensor) for tensor in tensors]


for _schema, _function in (
    ("gradient_of(Tensor value, int index) -> Tensor", _like),
    ("hooked(Tensor value, int index) -> Tensor", _like),
    ("hook(Tensor[] values, Tensor[] gradients, Tensor?[] results, int index) -> ()", lambda *args: None),
    (
        "custom_gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] gradients, Tensor?[] results, int index) "
        "-> Tensor[]",
        _all_like,
    ),
):
    _library.define(_schema)  # type: ignore[no-untyped-call]
    _name = _schema.split("(")[0]
    _library.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"ravnest::{_name}", _function, lib=_library)
torch.fx.node.has_side_effect(torch.ops.ravnest.hook.default)

_REPLACED: dict[type, type] = {torch.nn.modules._functions.CrossMapLRN2d: LocalResponseNorm}


class UntracedBackward(TraceError):
    """A backward pass cannot be traced; `index` is its position in `GradientRecorder.passes`."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


class _Context(FunctionCtx):
    """The `ctx` of an autograd function."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.to_save: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


class GradientRecorder:
    """Records the backward passes of `module`'s own; those in `skipped` are left to autograd."""

    def __init__(self, module: nn.Module, skipped: dict[Any, str]) -> None:
        self.module = module
        self.skipped = skipped  # key of an autograd function or hook -> why it is not traced
        self.passes: list[tuple[Any, str]] = []  # key of the autograd function or hook, and its description
        self._hooks: list[tuple[Tensor, Tensor, int, Callable[..., Any], RemovableHandle]] = []
        self._parameter_hooks = {
            name: list(parameter._backward_hooks.values())
            for name, parameter in module.named_parameters()
            if parameter._backward_hooks and parameter.requires_grad
        }

    def skip(self, error: UntracedBackward) -> None:
        """Leave out a backward pass in the next attempt."""
        key, description = self.passes[error.index]
        text = f"{description}: {error.reason}"
        if key in self.skipped:
            raise TraceError(text)
        self.skipped[key] = text

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record everything that runs inside."""
        of_root = self.module.register_forward_hook(self._after_forward)
        with (
            _patched(_SingleLevelFunction, "apply", classmethod(self._apply)),
            _patched(Tensor, "register_hook", lambda tensor, hook: self._register_hook(tensor, hook)),
            _patched(BackwardHook, "setup_input_hook", lambda hooks, args: self._module_inputs(hooks, args)),
            _patched(BackwardHook, "setup_output_hook", lambda hooks, result: self._module_outputs(hooks, result)),
        ):
            try:
                yield
            finally:
                of_root.remove()

    def _new_pass(self, function: Any, description: str) -> int:
        self.passes.append((_key(function), description))
        return len(self.passes) - 1

    def _is_skipped(self, function: Any) -> bool:
        return _key(function) in self.skipped

    # Autograd functions.

    def _apply(self, function: Any, *args: Any) -> Any:
        function = _REPLACED.get(function, function)
        needs = tuple(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        is_recorded = torch.is_grad_enabled() and any(needs)
        context = _Context(needs)
        if function is CheckpointFunction:
            run, _, *inputs = args
            with nullcontext() if is_recorded else torch.no_grad():
                return run(*inputs)
        if function.__module__.startswith("torch."):
            return super(_SingleLevelFunction, function).apply(*args)  # type: ignore[misc]
        if not is_recorded or self._is_skipped(function):
            with nullcontext() if is_recorded else torch.no_grad():
                return _forward(function, context, args)
        index = self._new_pass(function, f"the autograd function {function.__name__}")
        with self._tracing(index), torch.no_grad():
            output = _forward(function, context, args)
            if context.dirty_tensors:
                raise UntracedBackward(index, "it writes to its inputs (mark_dirty)")
        outputs = list(output) if isinstance(output, tuple) else [output]
        found = self._differentiate(function, context, index, args, outputs)
        return tuple(found) if isinstance(output, tuple) else found[0]

    def _differentiate(
        self, function: Any, context: _Context, index: int, args: Sequence[Any], outputs: list[Any]
    ) -> list[Any]:
        """The outputs of an autograd function, with its backward pass."""
        constant = context.non_differentiable
        chosen = [
            i
            for i, o in enumerate(outputs)
            if isinstance(o, Tensor) and (o.is_floating_point() or o.is_complex()) and all(o is not c for c in constant)
        ]
        if not chosen:
            return outputs
        inputs = [arg for arg, needed in zip(args, context.needs_input_grad, strict=True) if needed]
        with self._tracing(index), torch.no_grad():
            placeholders = {i: torch.ops.ravnest.gradient_of(outputs[i], index) for i in chosen}
            gradients = [
                placeholders[i]
                if i in placeholders
                else (torch.zeros_like(o) if isinstance(o, Tensor) and context.materialize_grads else None)
                for i, o in enumerate(outputs)
            ]
            backward = function.backward if function.vjp is Function.vjp else function.vjp
            given = backward(context, *gradients)
            results = _of_inputs(given if isinstance(given, tuple) else (given,), args, context.needs_input_grad)
        connected = torch.ops.ravnest.custom_gradient(
            [outputs[i] for i in chosen], inputs, list(placeholders.values()), results, index
        )
        for i, tensor in zip(chosen, connected, strict=True):
            outputs[i] = tensor
        return outputs

    # Hooks on tensors and parameters.

    def _register_hook(self, tensor: Tensor, hook: Callable[..., Any]) -> Any:
        with torch._C.DisableTorchFunction():  # modes would call the replaced method again
            handle = _register_hook(tensor, hook)  # type: ignore[no-untyped-call]
        if not self._is_skipped(hook):
            index = self._new_pass(hook, f"the hook {_name_of(hook)} on the gradient of a tensor")
            self._hooks.append((tensor, torch.ops.ravnest.hooked(tensor, index), index, hook, handle))
        return handle

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Trace the hooks that are still registered: they run in the backward pass, after all of the forward pass."""
        parameters = dict(module.named_parameters())
        for tensor, anchor, index, hook, handle in self._hooks:
            registered = handle.hooks_dict_ref()
            if registered is None or handle.id in registered:  # None: the tensor was written since
                self._trace_hook(tensor, anchor, index, hook)
        for name, hooks in self._parameter_hooks.items():
            for hook in hooks:
                if not self._is_skipped(hook):
                    public = name.removeprefix("model.")
                    index = self._new_pass(hook, f"the gradient hook {_name_of(hook)} of the parameter {public}")
                    anchor = torch.ops.ravnest.hooked(parameters[name], index)
                    self._trace_hook(parameters[name], anchor, index, hook)
        self._hooks.clear()  # the forward pass may run several times

    def _trace_hook(self, tensor: Tensor, anchor: Tensor, index: int, hook: Callable[..., Any]) -> None:
        with self._tracing(index), torch.no_grad():
            gradient = torch.ops.ravnest.gradient_of(tensor, index)
            result = hook(gradient)
            new = gradient if result is None else _matching(result, tensor)
            torch.ops.ravnest.hook([anchor], [gradient], [new], index)

    # Backward hooks of modules.

    def _module_inputs(self, hooks: Any, args: Sequence[Any]) -> Any:
        hooks.n_inputs = len(args)
        hooks.recorded = {}
        if not torch.is_grad_enabled():
            return args
        new = list(args)
        for i, arg in enumerate(args):
            if isinstance(arg, Tensor) and arg.requires_grad:
                hooks.recorded[i] = new[i] = torch.ops.aten.alias.default(arg)
        return tuple(new)

    def _module_outputs(self, hooks: Any, result: Any) -> Any:
        outputs = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple) else []
        chosen = [i for i, o in enumerate(outputs) if isinstance(o, Tensor) and o.requires_grad]
        if not chosen or not torch.is_grad_enabled():
            return result
        carriers = self._input_hooks(hooks, [outputs[i] for i in chosen], chosen, len(outputs))
        connected = self._output_hooks(hooks, [outputs[i] for i in chosen], chosen, len(outputs), carriers)
        for i, tensor in zip(chosen, connected, strict=True):
            outputs[i] = tensor
        if isinstance(result, Tensor):
            return outputs[0]
        return tuple(outputs) if type(result) is tuple else type(result)(*outputs)

    def _output_hooks(
        self, hooks: Any, outputs: list[Tensor], chosen: Sequence[int], count: int, carriers: list[Tensor]
    ) -> list[Tensor]:
        """The outputs of a module, whose gradients pass through its backward pre-hooks, and go to `carriers` too."""
        users = [hook for hook in hooks.user_pre_hooks if not self._is_skipped(hook)]
        if not users and not carriers:
            return outputs
        index = self._new_pass(users[0] if users else None, f"a backward pre-hook of the module {self._name(hooks)}")
        with self._tracing(index), torch.no_grad():
            placeholders = [torch.ops.ravnest.gradient_of(output, index) for output in outputs]
            gradients = _packed(placeholders, chosen, count)
            for hook in users:
                gradients = _replaced(gradients, hook(hooks.module, gradients))
            results = [
                None if gradients[i] is None else _matching(gradients[i], output)
                for i, output in zip(chosen, outputs, strict=True)
            ]
        inputs = [*outputs, *carriers]
        of_carriers = results if carriers else []
        return torch.ops.ravnest.custom_gradient(  # type: ignore[no-any-return]
            outputs, inputs, placeholders, [*results, *of_carriers], index
        )

    def _input_hooks(self, hooks: Any, outputs: list[Tensor], chosen: Sequence[int], count: int) -> list[Tensor]:
        """Trace the full backward hooks; returns a tensor for each output if they read the gradients of the outputs.

        These gradients arrive as those of tensors of zeros, which the module's inputs pass to its outputs.
        """
        users = [hook for hook in hooks.user_hooks if not self._is_skipped(hook)]
        if not users or not hooks.recorded:
            return []
        index = self._new_pass(users[0], f"a full backward hook of the module {self._name(hooks)}")
        inputs: dict[int, Tensor] = hooks.recorded
        with torch.no_grad():
            carriers = [torch.zeros(o.shape, dtype=o.dtype, device=o.device) for o in outputs]
            anchors = [torch.ops.ravnest.hooked(tensor, index) for tensor in (*inputs.values(), *carriers)]
        with self._tracing(index), torch.no_grad():
            of_inputs = [torch.ops.ravnest.gradient_of(tensor, index) for tensor in inputs.values()]
            of_outputs = [torch.ops.ravnest.gradient_of(output, index) for output in outputs]
            gradients = _packed(of_inputs, tuple(inputs), hooks.n_inputs)
            with _Reads(of_outputs) as reads:
                for hook in users:
                    gradients = _replaced(gradients, hook(hooks.module, gradients, _packed(of_outputs, chosen, count)))
            is_changed = any(gradients[i] is not g for i, g in zip(inputs, of_inputs, strict=True))
            is_read = is_changed and (reads.found or any(g is o for g in gradients for o in of_outputs))
            used = len(anchors) if is_read else len(inputs)
            results = [None if (g := gradients[i]) is None else _matching(g, tensor) for i, tensor in inputs.items()]
            torch.ops.ravnest.hook(
                anchors[:used],
                [*of_inputs, *of_outputs][:used],
                [*results, *[None] * len(carriers)][:used],
                index,
            )
        return carriers if is_read else []

    def _name(self, hooks: Any) -> str:
        names = {id(part): name.removeprefix("model.") for name, part in self.module.named_modules()}
        return names.get(id(hooks.module)) or "itself"

    @contextmanager
    def _tracing(self, index: int) -> Iterator[None]:
        """Report errors of a backward pass as `UntracedBackward`."""

        def differentiate(*args: Any, **kwargs: Any) -> Any:
            raise UntracedBackward(index, "it calls autograd itself")

        with _patched(torch.autograd, "grad", differentiate), _patched(torch.autograd, "backward", differentiate):
            try:
                yield
            except UntracedBackward:
                raise
            except Exception as error:  # any exception here is raised by the model's own backward pass
                raise UntracedBackward(index, f"{type(error).__name__}: {str(error)[:200]}") from error


_register_hook = Tensor.register_hook


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a class or module."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class _Reads(TorchFunctionMode):
    """Notes whether any of `tensors` is read."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors, self.found = tensors, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        self.found = self.found or any(arg is tensor for arg in given for tensor in self.tensors)
        return func(*args, **(kwargs or {}))


def _forward(function: Any, context: _Context, args: Sequence[Any]) -> Any:
    """The forward pass of an autograd function, in either of its forms."""
    if function.setup_context is Function.setup_context:
        return function.forward(context, *args)
    output = function.forward(*args)
    function.setup_context(context, args, output)
    return output


def _of_inputs(given: Sequence[Any], args: Sequence[Any], needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the arguments that need one."""
    if len(given) < len(args) or any(gradient is not None for gradient in given[len(args) :]):
        raise TraceError(f"its backward returns {len(given)} gradients for {len(args)} arguments")
    return [
        None if gradient is None else _matching(gradient, arg)
        for gradient, arg, is_needed in zip(given, args, needed, strict=False)
        if is_needed
    ]


def _matching(gradient: Any, tensor: Tensor) -> Tensor:
    """The gradient in the shape and dtype of its tensor, as autograd converts it."""
    if not isinstance(gradient, Tensor):
        raise TraceError(f"it returns a {type(gradient).__name__} instead of a tensor")
    extra = gradient.dim() - tensor.dim()
    if extra < 0:
        raise TraceError(f"it returns a gradient of shape {tuple(gradient.shape)} for {tuple(tensor.shape)}")
    sizes = zip(gradient.shape[extra:], tensor.shape, strict=True)
    summed = [*range(extra), *(extra + i for i, (given, wanted) in enumerate(sizes) if given != wanted)]
    if any(tensor.shape[i - extra] != 1 for i in summed[extra:]):
        raise TraceError(f"it returns a gradient of shape {tuple(gradient.shape)} for {tuple(tensor.shape)}")
    found = gradient.sum(summed, keepdim=True).reshape(tensor.shape) if summed else gradient
    return found if found.dtype == tensor.dtype else found.to(tensor.dtype)


def _packed(values: Sequence[Any], places: Sequence[int], count: int) -> tuple[Any, ...]:
    at = dict(zip(places, values, strict=True))
    return tuple(at.get(i) for i in range(count))


def _replaced(before: tuple[Any, ...], given: Any) -> tuple[Any, ...]:
    """What a module's hook returns in place of the gradients."""
    if given is None:
        return before
    new = given if isinstance(given, tuple) else (given,)
    if len(new) != len(before):
        raise TraceError(f"it returns {len(new)} gradients, expected {len(before)}")
    return new


def _key(function: Any) -> Any:
    """Identifies an autograd function or a hook, also if the forward pass defines it again each time."""
    if isinstance(function, type):
        return function.__module__, function.__qualname__
    return getattr(getattr(function, "__func__", function), "__code__", type(function))


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
