"""Comparison of two training steps from the same weights: loss, gradients, buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["StepResult", "are_equal", "differ", "differences", "largest_difference", "relative_difference"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
_NEGLIGIBLE = 1e-4  # of the largest gradient: smaller ones are sums of rounding errors


@dataclass
class StepResult:
    """The result of one forward and backward pass."""

    loss: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    cause: str = ""  # a construct of the model that tracing does not see


def differences(expected: StepResult, actual: StepResult, ties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the names that differ by more than rounding, each with a sentence. `ties`: other names of parameters."""
    if differ(expected.loss, actual.loss):
        yield "loss", f"its loss is {float(actual.loss):.6g}, that of the model {float(expected.loss):.6g}"
    largest = max((_largest(gradient) for gradient in expected.gradients.values()), default=0.0)
    merged = {ties.get(name, name): gradient for name, gradient in expected.gradients.items()}
    for name in sorted({*merged, *actual.gradients}):
        wanted, found = merged.get(name), actual.gradients.get(name)
        if wanted is None or found is None:
            present = wanted if found is None else found
            assert present is not None
            if _largest(present) > _NEGLIGIBLE * largest:
                yield name, f"{name} has {'no gradient' if found is None else 'a gradient'}, unlike in the model"
        elif differ(wanted, found, _NEGLIGIBLE * largest):
            yield (
                name,
                f"the gradient of {name} differs by {float((wanted - found).abs().max()):.3g}, "
                f"its largest element is {_largest(wanted):.3g}",
            )
    for name, found in actual.buffers.items():
        wanted = expected.buffers.get(name)
        if wanted is not None and differ(wanted, found):
            yield name, f"the buffer {name} has another value after a step"


def largest_difference(expected: StepResult, actual: StepResult) -> float:
    """The largest difference of a gradient, relative to that gradient's largest element."""
    pairs = ((expected.gradients[n], g) for n, g in actual.gradients.items() if n in expected.gradients)
    return max((relative_difference(wanted, found) for wanted, found in pairs), default=0.0)


def differ(wanted: Tensor, found: Tensor, floor: float = 0.0) -> bool:
    """Whether two tensors differ by more than rounding, relative to the largest element (at least `floor`)."""
    if wanted.shape != found.shape:
        return True
    if are_equal(wanted, found) or not wanted.numel():
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return True
    scale = max(_largest(wanted), floor, 1e-30)
    difference = (
        float((wanted.double() - found.double()).abs().max())
        if not wanted.is_complex()
        else float((wanted - found).abs().max())
    )
    return not difference <= _TOLERANCE.get(wanted.dtype, 1e-3) * scale


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether all elements are equal, NaN to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num())))


def relative_difference(wanted: Tensor, found: Tensor) -> float:
    """The largest difference of two elements, relative to the largest element."""
    if not wanted.numel() or torch.equal(wanted, found):
        return 0.0
    return float((wanted - found).abs().max()) / max(_largest(wanted), 1e-30)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
