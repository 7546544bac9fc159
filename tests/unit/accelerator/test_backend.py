"""The test accelerator has the properties of a real one that other tests rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerator.devices import TestAccelerator
from tests.accelerator.installed import install

DEVICE = "testacc:0"


def test_it_computes_what_the_processor_computes(accelerator: TestAccelerator) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.LayerNorm(16), nn.Linear(16, 4)), torch.randn(3, 8)
    results = []
    for device in ("cpu", DEVICE):
        own = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
        own.load_state_dict(model.state_dict())
        optimizer = torch.optim.AdamW(own.parameters())
        torch.manual_seed(1)  # its own random numbers, from the same seed
        own(x.to(device)).square().mean().backward()
        optimizer.step()
        assert own[0].weight.device == torch.device(device)
        results.append([p.detach().cpu() for p in own.parameters()])
    assert all(map(torch.equal, *results))


def test_it_refuses_to_mix_devices(accelerator: TestAccelerator) -> None:
    a = torch.ones(3, device=DEVICE)
    for other in (torch.ones(3), torch.ones(3, device="testacc:1")):
        with pytest.raises(RuntimeError, match="same device"):
            a + other
    assert (a + torch.tensor(1.0)).cpu().tolist() == [2.0] * 3  # a number of the CPU is allowed


def test_its_memory_is_limited_and_measured(accelerator: TestAccelerator) -> None:
    accelerator.limit(10_000)
    kept = torch.zeros(2000, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4000 bytes"):
        torch.zeros(1000, device=DEVICE)
    used = accelerator.memory_allocated()
    del kept
    assert accelerator.memory_allocated() == used - 8000
    assert accelerator.max_memory_allocated() >= used


def test_a_download_has_garbage_until_it_is_waited_for(accelerator: TestAccelerator) -> None:
    host, there = torch.empty(3), torch.ones(3, device=DEVICE)
    host.copy_(there, non_blocking=True)
    assert host.isnan().all()
    accelerator.synchronize()
    assert host.tolist() == [1.0] * 3
    assert accelerator.counts.to_host_shapes == [(3,)]


def test_an_upload_in_a_side_stream_has_garbage_until_it_is_waited_for(accelerator: TestAccelerator) -> None:
    side, host = accelerator.Stream(device=DEVICE), torch.ones(3)
    with accelerator.stream(side):
        there = torch.empty(3, device=DEVICE)
        there.copy_(host, non_blocking=True)
    assert there.cpu().isnan().all()
    accelerator.current_stream().wait_event(side.record_event())
    assert there.cpu().tolist() == [1.0] * 3


def test_the_source_of_an_upload_may_not_change(accelerator: TestAccelerator) -> None:
    host, there = torch.ones(3), torch.empty(3, device=DEVICE)
    there.copy_(host, non_blocking=True)
    host.zero_()
    with pytest.raises(RuntimeError, match="the source of a copy changed"):
        accelerator.synchronize()


def test_a_side_stream_must_wait_for_results(accelerator: TestAccelerator) -> None:
    side, result, host = accelerator.Stream(device=DEVICE), torch.ones(3, device=DEVICE) * 2, torch.empty(3)
    with accelerator.stream(side), pytest.raises(RuntimeError, match="without waiting for it"):
        host.copy_(result, non_blocking=True)
    side.wait_stream(accelerator.current_stream())
    with accelerator.stream(side):
        host.copy_(result, non_blocking=True)
    side.synchronize()
    assert host.tolist() == [2.0] * 3


def test_autocast_computes_products_in_lower_precision(accelerator: TestAccelerator) -> None:
    x, w = torch.randn(2, 8), torch.randn(4, 8)
    with torch.autocast("testacc", dtype=torch.bfloat16):
        there = nn.functional.linear(x.to(DEVICE), w.to(DEVICE))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        here = nn.functional.linear(x, w)
    assert there.dtype == torch.bfloat16
    assert torch.equal(there.cpu(), here)


@pytest.mark.slow
def test_other_processes_find_it_as_an_installed_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, devices=2)
    code = "import torch; print(torch.accelerator.current_accelerator(), torch.ones(2, device='testacc:1').device)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["testacc", "testacc:1"]
