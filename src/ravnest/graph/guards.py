"""Operations whose arguments torch does not check completely, with the checks that it leaves out.

A stage comes from an untrusted sender: no argument may make torch read or write outside its tensors or run without
bound. In a dry run tensors have no values, and only shapes are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GUARDED"]

_MAX_DIFFERENCES = 16


def _ctc_loss(log_probabilities: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch reads beyond the classes if a target is out of range, and needs the lengths to compute shapes."""
    if _has_values(targets):
        _check_range(targets, log_probabilities.shape[-1], "CTC target")
    elif isinstance(args[0], torch.Tensor):
        return _ctc_shape(log_probabilities, *args, **kwargs)
    kind = torch.ops.aten.ctc_loss.Tensor if isinstance(args[0], torch.Tensor) else torch.ops.aten.ctc_loss.IntList
    loss: torch.Tensor = kind(log_probabilities, targets, *args, **kwargs)
    return loss


def _ctc_shape(
    log_probabilities: torch.Tensor, lengths: torch.Tensor, target_lengths: torch.Tensor, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """A tensor like the loss, for a dry run."""
    if lengths.dim() > 1 or lengths.shape != target_lengths.shape or log_probabilities.dim() not in (2, 3):
        raise ValueError("CTC loss takes a length per sample")
    losses = log_probabilities.sum(-1).sum(0)
    return losses if reduction == 0 else losses.sum()


def _fractional_max_pool(dimensions: int) -> Callable[..., Any]:
    """torch computes positions from the random samples, which it does not check."""
    overload = getattr(torch.ops.aten, f"fractional_max_pool{dimensions}d").default

    def pool(x: torch.Tensor, kernel: list[int], output: list[int], samples: torch.Tensor) -> Any:
        batch = x.shape[:-dimensions] if x.dim() == dimensions + 2 else (1, *x.shape[:-dimensions])
        if x.dim() not in (dimensions + 1, dimensions + 2) or tuple(samples.shape) != (*batch, dimensions):
            raise ValueError("fractional pooling takes random samples for every sample and channel")
        if any(n < 1 for n in (*kernel, *output)):
            raise ValueError("fractional pooling takes sizes > 0")
        if _has_values(samples) and not bool(((samples >= 0) & (samples < 1)).all()):
            raise ValueError("fractional pooling takes random samples from 0 to 1")
        return overload(x, kernel, output, samples)

    return pool


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch takes the ends of the groups as they are, and computes shapes only for bfloat16."""
    if isinstance(offsets, torch.Tensor) and not _has_values(offsets) and (a.dim(), b.dim()) == (2, 3):
        return a @ b[0]
    if isinstance(offsets, torch.Tensor):
        _check_range(offsets, max(*a.shape[-2:], b.shape[-1]) + 1, "end of a group")
        if offsets.numel() > 1 and bool((offsets.diff() < 0).any()):
            raise IndexError("the ends of groups must not decrease")
    product: torch.Tensor = torch.ops.aten._grouped_mm.default(a, b, offsets, *args, **kwargs)
    return product


def _diff(tensor: torch.Tensor, n: int = 1, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Each of the n differences is another pass."""
    if n > _MAX_DIFFERENCES:
        raise ValueError(f"diff must have n <= {_MAX_DIFFERENCES}, got {n}")
    return torch.ops.aten.diff.default(tensor, n, *args, **kwargs)  # type: ignore[no-any-return]


def _geqrf(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch computes no shapes for it."""
    if tensor.device.type == "meta":
        if tensor.dim() < 2:
            raise ValueError("geqrf takes matrices")
        reflectors = tensor.new_empty((*tensor.shape[:-2], min(tensor.shape[-2:])))
        return tensor.mT.contiguous().mT, reflectors
    return torch.ops.aten.geqrf.default(tensor)  # type: ignore[no-any-return]


def _binary_cross_entropy(
    probabilities: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1
) -> torch.Tensor:
    """torch does not write the loss of shapes that differ, one of them empty."""
    if any(t is not None and t.shape != probabilities.shape for t in (targets, weight)):
        raise ValueError("binary cross entropy takes probabilities, targets and weights of one shape")
    return torch.ops.aten.binary_cross_entropy.default(probabilities, targets, weight, reduction)  # type: ignore[no-any-return]


def _weight_norm(direction: torch.Tensor, magnitude: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """torch reads as many magnitudes as the direction has in that dimension, however many there are."""
    rank = direction.dim()
    expected = () if dim == -1 else tuple(direction.shape[i] if i == dim else 1 for i in range(rank))  # -1: of all
    if not -1 <= dim < rank or direction.numel() == 0 or tuple(magnitude.shape) != expected:
        raise ValueError(f"weight norm of {tuple(direction.shape)} takes magnitudes of shape {expected}")
    return torch.ops.aten._weight_norm.default(direction, magnitude, dim)  # type: ignore[no-any-return]


def _div(tensor: Any, other: Any, *, rounding_mode: str | None) -> torch.Tensor:
    """The smallest integer divided by -1 ends the process if it is rounded by truncation."""
    kind = torch.ops.aten.div.Tensor_mode if isinstance(other, torch.Tensor) else torch.ops.aten.div.Scalar_mode
    if rounding_mode != "trunc" or not _has_values(tensor) or not _is_minus_one_in(tensor, other):
        return kind(tensor, other, rounding_mode=rounding_mode)  # type: ignore[no-any-return]
    if not isinstance(other, torch.Tensor):
        return -tensor  # type: ignore[no-any-return]
    quotient = kind(tensor, torch.where(other == -1, 1, other), rounding_mode=rounding_mode)
    return torch.where(other == -1, -tensor.to(quotient.dtype), quotient)


def _is_minus_one_in(tensor: torch.Tensor, divisor: torch.Tensor | float) -> bool:
    """Whether integers are divided by -1."""
    if isinstance(divisor, torch.Tensor):
        is_integer = not (tensor.is_floating_point() or divisor.is_floating_point())
        return is_integer and not divisor.is_complex() and bool((divisor == -1).any())
    return isinstance(divisor, int) and divisor == -1 and tensor.dtype.is_signed and not tensor.is_floating_point()


def _index(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """A mask selects at most all elements: that many are assumed where it has no values."""
    bounded: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if is_mask and (index.device.type == "meta" or type(index) is not torch.Tensor):  # type: ignore[union-attr]
            bounded += _every_element(tensor, index, len(bounded))  # type: ignore[arg-type]
        else:
            bounded.append(index)
    return torch.ops.aten.index.Tensor(tensor, bounded)  # type: ignore[no-any-return]


def _every_element(tensor: torch.Tensor, mask: torch.Tensor, first: int) -> list[torch.Tensor]:
    """Indices instead of a mask that starts at a dimension of the tensor, as if all of its elements were true."""
    if tensor.shape[first : first + mask.dim()] != mask.shape:
        raise IndexError(f"a mask of shape {tuple(mask.shape)} does not fit {tuple(tensor.shape)} at dimension {first}")
    return [torch.zeros(mask.numel(), dtype=torch.int64, device=mask.device) for _ in mask.shape]


def _sample_dirichlet(concentration: torch.Tensor) -> torch.Tensor:
    """torch computes no shapes for it."""
    if concentration.device.type == "meta" or type(concentration) is not torch.Tensor:
        if not concentration.is_floating_point():
            raise ValueError("a Dirichlet distribution takes floating-point numbers")
        return torch.empty_like(concentration)
    return torch.ops.aten._sample_dirichlet.default(concentration)  # type: ignore[no-any-return]


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements that can be read: not one of a dry run or a trace."""
    return tensor.device.type != "meta" and type(tensor) is torch.Tensor and tensor.numel() > 0


def _check_range(indices: torch.Tensor, size: int, what: str) -> None:
    low, high = (int(bound) for bound in indices.aminmax())
    if low < 0 or high >= size:
        raise IndexError(f"{what} is out of range: {low if low < 0 else high}, expected 0 to {size - 1}")


GUARDED: dict[str, Callable[..., Any]] = {  # torch does not check all of their arguments
    "aten.ctc_loss.IntList": _ctc_loss,
    "aten.ctc_loss.Tensor": _ctc_loss,
    "aten._grouped_mm.default": _grouped_mm,
    "aten.fractional_max_pool2d.default": _fractional_max_pool(2),
    "aten.fractional_max_pool3d.default": _fractional_max_pool(3),
    "aten.diff.default": _diff,
    "aten._weight_norm.default": _weight_norm,
    "aten.binary_cross_entropy.default": _binary_cross_entropy,
    "aten.geqrf.default": _geqrf,
    "aten.div.Tensor_mode": _div,
    "aten.div.Scalar_mode": _div,
    "aten.divide.Tensor_mode": _div,
    "aten.divide.Scalar_mode": _div,
    "aten._sample_dirichlet.default": _sample_dirichlet,
    "aten.index.Tensor": _index,
}
