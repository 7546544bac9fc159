"""Every test process computes with one thread: the machine has few cores, and the same bits come out each time."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from ravnest.cli import main

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that may take longest begin first: then none of the test processes is left with them in the end."""
    items.sort(key=lambda item: -_patience_s(item))


def _patience_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args[0] > 100:
        return float(marker.args[0])
    return 1.0 if item.get_closest_marker("slow") is not None else 0.0


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
