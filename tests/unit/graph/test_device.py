"""Questions about devices, answered for a PC with and without accelerators."""

from __future__ import annotations

import pytest
import torch

from ravnest.errors import RavnestError
from ravnest.graph import Interpreter, Stage, Value
from ravnest.graph.device import (
    CPU,
    available_devices,
    check_device,
    choose_device,
    device_memory,
    device_name,
    has_bfloat16,
    is_out_of_memory,
    peak_device_bytes,
    release_memory,
)
from ravnest.graph.program import Arg, Op
from tests.accelerator.devices import TestAccelerator

FIRST, SECOND = torch.device("testacc:0"), torch.device("testacc:1")


def test_a_pc_without_accelerators_computes_on_the_processor() -> None:
    assert available_devices() == [CPU]
    assert choose_device() == choose_device("cpu") == choose_device("cpu:0") == CPU
    assert (device_name(CPU), device_memory(CPU), has_bfloat16(CPU)) == ("processor", None, True)
    check_device(CPU)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "xpu:1"])
def test_a_device_that_the_pc_does_not_have_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is no device {name} on this PC; its devices are cpu"):
        choose_device(name)


def test_a_text_that_is_no_device_is_rejected(accelerator: TestAccelerator) -> None:
    with pytest.raises(
        ValueError, match=r"device must be auto or one of this PC's, testacc:0, testacc:1, cpu, got 'gpu'"
    ):
        choose_device("gpu")


def test_auto_is_the_first_accelerator(accelerator: TestAccelerator) -> None:
    assert available_devices() == [FIRST, SECOND, CPU]
    assert choose_device() == choose_device("testacc") == FIRST
    assert choose_device("testacc:1") == SECOND
    assert choose_device("cpu") == CPU
    with pytest.raises(ValueError, match="there is no device testacc:2 on this PC"):
        choose_device("testacc:2")


def test_the_memory_of_a_device_is_its_own(accelerator: TestAccelerator) -> None:
    accelerator.limit(1_000_000)
    release_memory(FIRST)
    before = peak_device_bytes(FIRST)
    kept = torch.zeros(1000, device=FIRST)
    memory = device_memory(FIRST)
    assert memory is not None
    assert memory.free_bytes == 996_000
    assert peak_device_bytes(FIRST) == before + 4000
    del kept
    assert peak_device_bytes(FIRST) == before + 4000
    release_memory(FIRST)
    assert peak_device_bytes(FIRST) == before


def test_a_device_that_disappears_is_an_error_with_a_sentence(accelerator: TestAccelerator) -> None:
    check_device(FIRST)
    accelerator.limit(0)
    with pytest.raises(RavnestError, match="testacc:0 does not compute: testacc out of memory"):
        check_device(FIRST)
    accelerator.disappear()
    with pytest.raises(ValueError, match="there is no device testacc:0 on this PC; its devices are cpu"):
        choose_device("testacc:0")


def test_a_device_may_lack_bfloat16(accelerator: TestAccelerator) -> None:
    assert has_bfloat16(FIRST)
    accelerator.has_bf16 = False
    assert not has_bfloat16(FIRST)


def test_errors_of_memory_are_recognised() -> None:
    with pytest.raises(RuntimeError) as too_much:
        torch.empty(2**46)
    assert is_out_of_memory(too_much.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


@pytest.mark.parametrize("kwargs", [{}, {"device": None}, {"device": "@"}])
def test_a_stage_computes_what_it_creates_on_its_device(kwargs: dict[str, Arg], accelerator: TestAccelerator) -> None:
    """A stage file cannot choose another one."""
    made = Op("aten.arange.default", ("made",), (3,), kwargs=kwargs)
    total = Op("aten.add.Tensor", ("total",), ("%x", "%made"))
    stage = Stage(
        index=0, count=1, inputs=(Value("x", "int64", (3,)),), outputs=(Value("total", "int64", (3,)),), state=(),
        ops=(made, total),
    )  # fmt: skip
    (result,) = Interpreter(stage, FIRST)({}, [torch.tensor([5, 6, 7], device=FIRST)])
    assert result.device == FIRST
    assert result.cpu().tolist() == [5, 7, 9]
