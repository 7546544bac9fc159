"""The profile is that of the device that computes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.accelerator.devices import TestAccelerator

pytestmark = pytest.mark.slow

RunCli = Callable[..., tuple[int, str, str]]


def test_the_profile_of_an_accelerator(accelerator: TestAccelerator, run_cli: RunCli) -> None:
    accelerator.limit(2_000_000_000)
    code, output, errors = run_cli("profile", "--device", "testacc:0", "--threads", "1", "--json")
    assert code == 0, errors
    profile = json.loads(output)
    assert (profile["device"], profile["device_name"]) == ("testacc:0", "Test Accelerator 0")
    assert 1_700_000_000 < profile["memory_bytes"] <= 1_800_000_000, "a tenth is a reserve"
    assert profile["host_memory_bytes"] > 400_000_000
    assert profile["gflops"] > 0
    assert (profile["low_precision"], profile["low_precision_gflops"] > 0) == ("bf16", True)
    assert profile["other_devices"] == ["testacc:1"]


def test_a_device_that_does_not_exist(run_cli: RunCli) -> None:
    code, _, errors = run_cli("profile", "--device", "cuda:7", "--json")
    assert code != 0
    assert "there is no device cuda:7 on this PC; its devices are cpu" in errors
