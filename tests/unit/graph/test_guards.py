"""Operations whose arguments torch does not check: a bad one is an error, and never a read outside the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ravnest.graph.guards import GUARDED
from ravnest.graph.ops import ALLOWED, INIT_ALLOWED, resolve

POOL = "aten.fractional_max_pool2d.default"
CTC = "aten.ctc_loss.Tensor"


def pooled(samples: torch.Tensor, kernel: tuple[int, int] = (2, 2), output: tuple[int, int] = (3, 3)) -> Any:
    return resolve(POOL)(torch.rand(2, 3, 8, 8), list(kernel), list(output), samples)


def test_guarded_operations_are_allowed_ones() -> None:
    assert set(GUARDED) <= {*ALLOWED, *INIT_ALLOWED}
    assert all(resolve(name) is guard for name, guard in GUARDED.items())


def test_fractional_pooling_is_as_in_torch() -> None:
    samples = torch.rand(2, 3, 2)
    assert [r.shape for r in pooled(samples)] == [(2, 3, 3, 3), (2, 3, 3, 3)]


SAMPLES = {
    **{f"value {value}": torch.full((2, 3, 2), value) for value in (1.0, -0.5, 1e9, float("nan"))},
    **{f"shape {shape}": torch.rand(shape) for shape in ((1, 3, 2), (2, 3, 1), (2, 3), (0, 3, 2))},
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_fractional_pooling_rejects_samples_outside_its_range(samples: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="fractional pooling takes random samples"):
        pooled(samples)


@pytest.mark.parametrize("sizes", [((0, 2), (3, 3)), ((2, 2), (0, 3)), ((2, 2), (-1, 3)), ((-2, 2), (3, 3))], ids=str)
def test_fractional_pooling_rejects_sizes(sizes: Any) -> None:
    with pytest.raises(ValueError, match="fractional pooling takes sizes > 0"):
        pooled(torch.rand(2, 3, 2), *sizes)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_a_ctc_loss_has_its_shape_in_a_dry_run(reduction: int) -> None:
    def loss(device: str) -> torch.Tensor:
        log_probabilities = torch.zeros(5, 3, 6, device=device).log_softmax(-1)
        targets = torch.ones(3, 2, dtype=torch.int64, device=device)
        lengths = torch.full((3,), 5, device=device), torch.full((3,), 2, device=device)
        made: torch.Tensor = resolve(CTC)(log_probabilities, targets, *lengths, 0, reduction)
        return made

    assert loss("cpu").shape == loss("meta").shape


def test_a_ctc_target_beyond_the_classes_is_rejected() -> None:
    lengths = torch.full((3,), 5), torch.full((3,), 2)
    with pytest.raises(IndexError, match="CTC target is out of range"):
        resolve(CTC)(torch.zeros(5, 3, 6), torch.full((3, 2), 6), *lengths)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["div", "divide"])
def test_the_smallest_integer_is_divided_by_minus_one(name: str, dtype: torch.dtype) -> None:
    """Without the guard, truncation ends the process here."""
    smallest = torch.iinfo(dtype).min
    tensor = torch.full((40,), smallest, dtype=dtype)
    for divisor in (torch.full((40,), -1, dtype=dtype), torch.tensor(-1, dtype=dtype)):
        assert resolve(f"aten.{name}.Tensor_mode")(tensor, divisor, rounding_mode="trunc").unique().tolist() == [
            smallest
        ]
    assert resolve(f"aten.{name}.Scalar_mode")(tensor, -1, rounding_mode="trunc").unique().tolist() == [smallest]


@pytest.mark.parametrize("mode", [None, "trunc", "floor"])
@pytest.mark.parametrize("dtypes", [("int64", "int32"), ("uint8", "int8"), ("float32", "int64"), ("int32", "float32")])
def test_division_is_that_of_torch(dtypes: tuple[str, str], mode: str | None) -> None:
    numbers = [-7, -2, -1, 1, 2, 5] if "uint8" not in dtypes else [1, 2, 5, 7, 1, 3]
    tensor = torch.tensor(numbers, dtype=getattr(torch, dtypes[0]))[:, None]
    divisor = torch.tensor([-3, -1, 1, 4], dtype=getattr(torch, dtypes[1]))
    for other in (divisor, -1, 3, 2.5):
        kind = "Tensor_mode" if isinstance(other, torch.Tensor) else "Scalar_mode"
        expected = torch.div(tensor, other, rounding_mode=mode)
        found = resolve(f"aten.div.{kind}")(tensor, other, rounding_mode=mode)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("shape", "magnitudes", "dim"),
    [
        ((1, 100_000), (), 1), ((1, 100_000), (1,), 1), ((100_000, 1), (1,), 0), ((2, 3), (3,), 1), ((2, 3), (2, 3), 0),
        ((2, 0, 3), (1, 1, 3), 2), ((2, 3), (1, 3), 2), ((2, 3), (3,), -1), ((), (), 0),
    ],
    ids=str,
)  # fmt: skip
def test_weight_norm_reads_no_magnitude_that_is_not_there(
    shape: tuple[int, ...], magnitudes: tuple[int, ...], dim: int, device: str
) -> None:
    """Without the guard, values of the memory behind the magnitudes are in the result, or the process ends."""
    with pytest.raises(ValueError, match="takes magnitudes of shape"):
        resolve("aten._weight_norm.default")(
            torch.ones(shape, device=device), torch.ones(magnitudes, device=device), dim
        )


@pytest.mark.parametrize(("magnitudes", "dim"), [((4, 1, 1), 0), ((1, 3, 1), 1), ((1, 1, 2), 2), ((), -1)])
def test_weight_norm_is_that_of_torch(magnitudes: tuple[int, ...], dim: int) -> None:
    direction, magnitude = torch.randn(4, 3, 2), torch.rand(magnitudes)
    expected = torch._weight_norm(direction, magnitude, dim)
    assert torch.equal(resolve("aten._weight_norm.default")(direction, magnitude, dim), expected)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("shape", "target", "weight"),
    [((), (3, 0), None), ((1,), (0,), None), ((2, 3), (3,), None), ((3,), (3,), (1,)), ((0,), (1,), None)],
    ids=str,
)
def test_shapes_of_a_binary_cross_entropy_are_the_same(
    shape: tuple[int, ...], target: tuple[int, ...], weight: tuple[int, ...] | None, device: str
) -> None:
    """Without the guard, some of these return memory that was not written."""
    loss = resolve("aten.binary_cross_entropy.default")
    weights = None if weight is None else torch.ones(weight, device=device)
    with pytest.raises(ValueError, match="of one shape"):
        loss(torch.full(shape, 0.5, device=device), torch.ones(target, device=device), weights, 2)
    same = torch.full(shape, 0.5, device=device)
    assert loss(same, torch.ones_like(same), None, 1).shape == ()
