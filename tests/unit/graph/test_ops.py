"""Invariants of the allow-list."""

from __future__ import annotations

import inspect

import pytest
import torch

from ravnest.graph import ALLOWED, FAMILIES
from ravnest.graph.ops import INIT_ALLOWED, SYM, needs_device, overload_of, resolve, schema_of
from ravnest.graph.validate import _PREDICATES, declared_arguments

# of torch.nn.utils.weight_norm, F.interpolate(antialias=True or mode="nearest-exact"), F.grouped_mm, and of
# the distributions Gamma, Beta and Dirichlet
ONLY_FORM = {
    "_weight_norm", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "_grouped_mm",
    "_standard_gamma", "_sample_dirichlet",
}  # fmt: skip
EVERYTHING = sorted({**ALLOWED, **INIT_ALLOWED})
FORBIDDEN_WORDS = (
    "empty", "as_strided", "set_", "resize", "from_file", "storage", "item", "_local_scalar", "pin_memory",
    "record_stream", "sparse", "quantize", "nonzero", "unique", "masked_select", "cuda", "cudnn", "mkldnn",
    "to_dense", "data_ptr",
)  # fmt: skip


@pytest.mark.parametrize("name", EVERYTHING)
def test_op(name: str) -> None:
    namespace, op, overload = name.split(".")
    assert namespace == "aten"
    assert not op.startswith("_") or op in ONLY_FORM, "private"
    assert op == "count_nonzero" or not any(word in op for word in FORBIDDEN_WORDS)
    assert isinstance(overload_of(name), torch._ops.OpOverload)
    assert callable(resolve(name))
    assert overload in getattr(torch.ops.aten, op).overloads()
    assert "Storage" not in str(schema_of(name))
    for argument in declared_arguments(name):
        inner = argument.type.replace("Optional[", "").replace("List[", "").rstrip("]")
        assert inner in _PREDICATES, f"nothing checks a {inner}"


def test_every_family_has_a_reason_and_no_op_is_in_two() -> None:
    assert all(family.reason.endswith(".") and len(family.reason) > 20 for family in FAMILIES.values())
    listed = [op for family in FAMILIES.values() for op in family.ops.split()]
    assert len(listed) == len(set(listed)) == len(ALLOWED)


def test_only_writes_may_write() -> None:
    writing = {name for name in ALLOWED if schema_of(name).is_mutable}
    assert writing == {name for name, family in ALLOWED.items() if family == "writes"}


def test_creation_ops_use_the_interpreters_device() -> None:
    creation = {name for name in ALLOWED if "Tensor" not in str([a.type for a in schema_of(name).arguments])}
    assert creation == {name for name in ALLOWED if needs_device(name)}
    assert "aten.zeros.default" in creation


def test_arithmetic_is_bounded() -> None:
    with pytest.raises(OverflowError):
        SYM["sym.mul"](2**40, 2**40)
    assert SYM["sym.mul"](2**30, 2**30) == 2**60
    assert not inspect.isbuiltin(SYM["sym.add"])
