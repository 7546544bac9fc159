"""Every test process computes with one thread: the machine has few cores, and the same bits come out each time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from ravnest.cli import main

torch.set_num_threads(1)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `ravnest` in this process with these arguments: its exit code, what it printed, and what it said besides."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ravnest", *map(str, args)])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return int(left.value.code or 0), printed.out, printed.err

    return run
