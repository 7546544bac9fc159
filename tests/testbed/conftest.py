"""`testbed` makes beds for a test, and skips it only where the machine lacks something, which it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ravnest.testbed import Testbed, Topology, missing


@pytest.fixture(scope="session")
def _lacking() -> list[str]:
    return missing()


@pytest.fixture
def machine(_lacking: list[str]) -> None:
    """The test needs a machine that can have a testbed."""
    if _lacking:
        pytest.skip(f"this machine cannot have a testbed, it lacks {'; '.join(_lacking)}")


@pytest.fixture
def testbed(machine: None) -> Iterator[Callable[[Topology], Testbed]]:
    """Makes beds that end with the test."""
    with ExitStack() as beds:
        yield lambda topology: beds.enter_context(Testbed(topology))


@pytest.fixture(scope="module")
def module_testbed(_lacking: list[str]) -> Iterator[Callable[[Topology], Testbed]]:
    """Makes beds that end with the last test of the file."""
    if _lacking:
        pytest.skip(f"this machine cannot have a testbed, it lacks {'; '.join(_lacking)}")
    with ExitStack() as beds:
        yield lambda topology: beds.enter_context(Testbed(topology))
