"""Models with backward passes of their own: autograd functions and hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def use(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def hook(tensor: Any, change: Callable[[Tensor], Any]) -> Any:
    return tensor.register_hook(change)


Function = torch.autograd.Function


class Round(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Sign(Function):
    """A straight-through estimator that is clipped, with a saved tensor and a mask written in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        of_x = gradient.clone()
        of_x[x.abs() > 1] = 0
        return of_x


class Reverse(Function):
    """Gradient reversal by a factor, which is a Python number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Identity(Function):
    """An output that is the input itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class Swish(Function):
    """The form with `setup_context`, and a saved output."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        gate = x.sigmoid()
        return x * gate, gate

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_gate: Tensor) -> Any:
        x, gate = ctx.saved_tensors
        return gradient * (gate + x * gate * (1 - gate)) * 2 + of_gate


class Exponential(Function):
    """Its backward pass reads the output; `saved` on the context, not by `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.saved = x.exp()
        return ctx.saved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved * 3


class Affine(Function):
    """Several inputs, among them parameters, a number and None; gradients of their own for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, frozen: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, frozen)
        ctx.scale, ctx.has_bias = scale, bias is not None
        y = x @ weight * scale + frozen
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, frozen = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, True, ctx.has_bias, False, False)
        of_bias = gradient if ctx.has_bias else None  # summed over the batch by autograd
        return gradient @ weight.t() * 0.1, x.t() @ gradient * ctx.scale, of_bias, None, frozen


class Split(Function):
    """Several outputs: a part that is used, one that is not, an index, and None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.width = x.shape[-1]
        first, second = x[:, :2] * 2, x[:, 2:].clone()
        return first, second, x.argmax(1), None

    @staticmethod
    def backward(ctx: Any, of_first: Tensor, of_second: Tensor, *others: Any) -> Tensor:
        assert of_second.shape[-1] == ctx.width - 2
        return torch.cat([of_first * 0.25, of_second + 0.01], 1)


class NoGradient(Function):
    """No gradient at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Normalise(Function):
    """A backward pass over the whole batch, with sizes that depend on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        rows, columns = gradient.shape
        flat = gradient.reshape(rows * columns)
        return (flat / (flat.abs().sum() / (rows * columns) + 1e-3)).view(rows, columns)


class Product(Function):
    """Two arguments that may be the same tensor."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a * 2


class Sums(Function):
    """Undefined gradients stay None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x + 1, x + 2

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        found = [g for g in (a, b) if g is not None]
        return sum(found) if found else None


class Noisy(Function):
    """Random numbers in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


class Checkpointed(Function):
    """The forward pass again, and autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.tanh(), x, gradient)[0]


class Recomputed(Checkpointed):
    """Another function in its backward pass."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.sin(), x, gradient)[0]


class Sparse(Function):
    """An operation that a stage may not use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * gradient.nonzero().shape[0]


class Branching(Function):
    """Control flow that depends on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient if float(gradient.sum()) > 1e9 else gradient * 0


class Listed(Function):
    """Too many gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient


class Keeping(Function):
    """Its gradient is kept outside."""

    kept: list[Tensor] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Keeping.kept.append(gradient * 2)
        return gradient


class Model(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 6), nn.Linear(6, 1), between
        self.third = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.third(self.between(self.first(x))))


class WithAffine(Model):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6)) if bias else None
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: Tensor) -> Any:
        y = use(Affine, self.first(x), self.weight, self.bias, 0.5, self.shift)
        return self.second(y)


class Tied(nn.Module):
    """One weight twice, each time through a straight-through estimator, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.again = nn.Linear(6, 6)
        self.again.weight = nn.Parameter(self.again.weight * 3)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.again.weight

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in (self.again, self.tied, self.again):
            x = use(Sign, F.linear(x, use(Round, layer.weight), layer.bias))
        return self.last(x)


def unused_parts(x: Tensor) -> Any:
    first, _, index, nothing = use(Split, x)
    assert nothing is None
    return F.pad(first, (0, 4)) + index.unsqueeze(1) * 0.1


def all_parts(x: Tensor) -> Any:
    first, second, index, _ = use(Split, x)
    return torch.cat([second, first], 1) * (1 + index.unsqueeze(1))


def swish(x: Tensor) -> Any:
    y, gate = use(Swish, x)
    assert not gate.requires_grad
    return y + gate


def written_later(x: Tensor) -> Any:
    y = use(Round, x * 2)
    y.mul_(3).add_(x)
    return y


def without_gradient(x: Tensor) -> Any:
    with torch.no_grad():
        mask = use(Round, x)
    return x * mask


def reentrant(x: Tensor) -> Any:
    return checkpoint(lambda y: use(Sign, y.tanh() * 2), x, use_reentrant=True)


def not_reentrant(x: Tensor) -> Any:
    return checkpoint(lambda y: use(Sign, y.tanh() * 2), x, use_reentrant=False)


class Dropped(Function):
    """Random numbers in the forward pass, and a view of them for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mask = (torch.rand_like(x) < 0.5).to(x.dtype)
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient * ctx.mask
        gradient[:, 0] *= 2
        return gradient


class Passing(Function):
    """Its input among its outputs, and an output twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        z = x + y
        return y, z, z * 2

    @staticmethod
    def backward(ctx: Any, of_y: Tensor, of_z: Tensor, of_double: Tensor) -> Any:
        return of_z * 3, of_y - of_double


def defined_inside(x: Tensor) -> Any:
    """A function and a hook that every forward pass defines anew."""

    class Local(Identity):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * x.detach().abs()

    y = use(Local, x)
    if y.requires_grad:
        hook(y, lambda gradient: gradient + y.detach())
    return y


class CheckpointedData(Model):
    """A reentrant checkpoint whose inputs need no gradient: its parameters get none either."""

    def forward(self, x: Tensor) -> Any:
        return self.second(self.third(checkpoint(self.first, x, use_reentrant=True)))


FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "straight-through": lambda: Model(Round.apply),
    "clipped straight-through": lambda: Model(Sign.apply),
    "reversal": lambda: Model(lambda x: use(Reverse, x, 0.7)),
    "identity": lambda: Model(Identity.apply),
    "setup_context": lambda: Model(swish),
    "saved output": lambda: Model(Exponential.apply),
    "several inputs": lambda: WithAffine(True),
    "optional input": lambda: WithAffine(False),
    "several outputs": lambda: Model(all_parts),
    "unused outputs": lambda: Model(unused_parts),
    "no gradient": lambda: Model(lambda x: use(NoGradient, x) + x),
    "only None": lambda: Model(NoGradient.apply),
    "whole batch": lambda: Model(Normalise.apply),
    "same input twice": lambda: Model(lambda x: use(Product, x, x)),
    "of each other": lambda: Model(lambda x: use(Product, use(Sign, x), use(Reverse, x, 2.0))),
    "undefined gradients": lambda: Model(lambda x: use(Sums, x)[1]),
    "tied, in a loop": Tied,
    "written later": lambda: Model(written_later),
    "without gradients": lambda: Model(without_gradient),
    "reentrant checkpoint": lambda: Model(reentrant),
    "reentrant checkpoint of data": CheckpointedData,
    "checkpoint": lambda: Model(not_reentrant),
    "random forward pass": lambda: Model(Dropped.apply),
    "input as an output": lambda: Model(lambda x: torch.stack(use(Passing, x, x.sin())).sum(0)),
    "defined inside": lambda: Model(defined_inside),
}  # fmt: skip


def hooked(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """A hook on a tensor that is read before and after the registration."""

    def between(x: Tensor) -> Tensor:
        before = x.sin()
        if x.requires_grad:
            hook(x, change)
        return before + x.relu()

    return between


def masked(x: Tensor) -> Tensor:
    """A hook that reads what was made from its tensor."""
    mask = (x.detach().cos() > 0).to(x.dtype) + x.shape[0]
    y = x * mask
    hook(x, lambda gradient: gradient * mask)
    return y


def twice_hooked(x: Tensor) -> Tensor:
    hook(x, lambda gradient: gradient.clamp(-0.01, 0.01))
    hook(x, lambda gradient: gradient + 1)
    removed = hook(x, lambda gradient: gradient * 0)
    y = x.exp()
    removed.remove()
    hook(y, lambda gradient: None)
    return y


def hooked_then_written(x: Tensor) -> Tensor:
    y = x * 1.0
    hook(y, lambda gradient: gradient * 2)
    y.mul_(3)
    return y


def hooked_output(x: Tensor) -> Any:
    y = use(Sign, x)
    hook(y, lambda gradient: gradient * gradient.shape[0])
    return y


def on_parameter(change: Callable[[Tensor], Any], *more: Callable[[Tensor], Any]) -> nn.Module:
    model = Model()
    for one in (change, *more):
        hook(model.third.weight, one)
    return model


def on_tied_parameter() -> nn.Module:
    model = Tied()
    mask = torch.ones(6, 6).tril()
    hook(model.again.weight, lambda gradient: gradient * mask)
    return model


def on_module(
    full: Callable[..., Any] | None = None, before: Callable[..., Any] | None = None, part: str = "third"
) -> nn.Module:
    model = Model()
    module = model.get_submodule(part)
    if full is not None:
        module.register_full_backward_hook(full)
    if before is not None:
        module.register_full_backward_pre_hook(before)
    return model


class Gate(nn.Module):
    """Several inputs and outputs."""

    def forward(self, a: Tensor, factor: float, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * b * factor, b.tanh()


def of_gate_outputs(module: nn.Module, of_outputs: Any) -> Any:
    return of_outputs[0] * 2, of_outputs[1].abs()


def of_gate_inputs(module: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return of_inputs[0] + of_outputs[1], None, of_inputs[2] * of_outputs[0]


class WithGate(Model):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.gate.register_full_backward_pre_hook(of_gate_outputs)
        self.gate.register_full_backward_hook(of_gate_inputs)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        a, b = self.gate(h, 0.5, self.third(h))
        return self.second(a + b)


def read_only(*args: Any) -> None:
    assert all(arg is not None for arg in args)


def written(gradient: Tensor) -> None:
    gradient.mul_(2).clamp_(-0.05, 0.05)


def on_parts(x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    hook(second, lambda gradient: gradient * 2)
    hook(first, written)
    view = x.view(-1)
    hook(view, lambda gradient: gradient.sqrt().nan_to_num())
    return torch.cat([second, first], 1) + view.view(x.shape).sin()


def in_loss(x: Tensor) -> Tensor:
    hook(x, lambda gradient: gradient.softmax(-1))
    return x


class HookedOutput(Model):
    def forward(self, x: Tensor) -> Tensor:
        return in_loss(super().forward(x))


HOOKS: dict[str, Callable[[], nn.Module]] = {
    "on a tensor": lambda: Model(hooked(lambda gradient: gradient * 2)),
    "that clips": lambda: Model(hooked(lambda gradient: gradient.clamp(-0.02, 0.02))),
    "that reads only": lambda: Model(hooked(read_only)),
    "that reads values": lambda: Model(masked),
    "several on a tensor": lambda: Model(twice_hooked),
    "before a write": lambda: Model(hooked_then_written),
    "on an output": lambda: Model(hooked_output),
    "on a parameter": lambda: on_parameter(lambda gradient: gradient * 0.1),
    "several on a parameter": lambda: on_parameter(torch.sign, lambda gradient: gradient + 0.5),
    "on a tied parameter": on_tied_parameter,
    "of a module": lambda: on_module(lambda module, of_inputs, of_outputs: (of_inputs[0] * 3,)),
    "of a module, of outputs": lambda: on_module(lambda module, of_inputs, of_outputs: (F.relu(of_outputs[0]),)),
    "of a module that reads": lambda: on_module(read_only, read_only),
    "before a module": lambda: on_module(before=lambda module, of_outputs: (of_outputs[0] * 0.5,)),
    "both of a module": lambda: on_module(
        lambda module, of_inputs, of_outputs: (of_inputs[0] + of_outputs[0].sum(),),
        lambda module, of_outputs: (of_outputs[0].sin(),),
    ),
    "of the first module": lambda: on_module(before=lambda module, of_outputs: (of_outputs[0] * 2,), part="first"),
    "of the whole model": lambda: on_module(before=lambda module, of_outputs: (of_outputs[0] * 2,), part=""),
    "several tensors of a module": WithGate,
    "on parts": lambda: Model(on_parts),
    "on the output": HookedOutput,
    "that writes": lambda: on_parameter(written),
}  # fmt: skip
