"""Copies between host and device, in streams beside the computation."""

from __future__ import annotations

import pytest
import torch

from ravnest.pipeline.transfers import Transfers
from tests.accelerator.devices import TestAccelerator


@pytest.fixture
def transfers(accelerator: TestAccelerator) -> Transfers:
    return Transfers(torch.device("testacc:0"))


def test_on_the_processor_nothing_is_copied() -> None:
    transfers, tensor = Transfers(torch.device("cpu")), torch.ones(3)
    assert transfers.upload([tensor]).tensors()[0] is tensor
    download = transfers.download([tensor])
    assert not download.is_pending
    assert download.tensors()[0] is tensor


def test_the_computation_waits_for_an_upload(transfers: Transfers) -> None:
    upload = transfers.upload([torch.arange(3.0)])
    (there,) = upload.tensors()
    assert (there * 2).cpu().tolist() == [0.0, 2.0, 4.0]


def test_a_download_is_complete_when_it_is_read(transfers: Transfers) -> None:
    download = transfers.download([torch.ones(3, device="testacc:0") * 2, torch.zeros(0, device="testacc:0")])
    assert download.is_pending
    assert [tensor.tolist() for tensor in download.tensors()] == [[2.0] * 3, []]


def test_what_a_download_reads_may_change_after_it(transfers: Transfers) -> None:
    there = torch.ones(3, device="testacc:0")
    late = transfers.download([there])
    there.zero_()
    with pytest.raises(RuntimeError, match="the source of a copy changed"):
        late.tensors()
    there.fill_(2.0)
    ordered = transfers.download([there])
    transfers.before_change()
    there.zero_()
    assert ordered.tensors()[0].tolist() == [2.0] * 3


def test_host_memory_is_free_after_an_upload_has_finished(transfers: Transfers, accelerator: TestAccelerator) -> None:
    host = torch.ones(3)
    upload = transfers.upload([host])
    upload.finish()
    host.zero_()
    assert upload.tensors()[0].cpu().tolist() == [1.0] * 3
    late = transfers.upload([host])
    host.fill_(5.0)
    with pytest.raises(RuntimeError, match="the source of a copy changed"):
        late.tensors()
