"""Worker processes and accelerators that are not there, or cannot do what a run needs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ravnest.protocol.worker import WorkerUnable
from tests.accelerator.installed import install
from tests.unit.transport.kinds import Members
from tests.unit.worker.fleet import PROFILE, Worker, ending

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_worker_whose_device_is_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members(tmp_path / "members")
    install(tmp_path / "package", monkeypatch, devices=1)
    profile = msgspec.structs.replace(PROFILE, device="testacc:1")
    worker = Worker(members["anna"], ("127.0.0.1", 1), profile=profile)
    with ending(worker):
        expected = "there is no device testacc:1 on this PC; its devices are testacc:0, cpu"
        assert worker.receive(WorkerUnable).reason == expected
