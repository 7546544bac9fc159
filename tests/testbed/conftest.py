"""`testbed` makes beds for a test, and skips it only where the machine lacks something, which it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ravnest.testbed import Testbed, Topology, missing
from tests.testbed.running import kill_all


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


@pytest.fixture(scope="module")
def _module_bed(request: pytest.FixtureRequest, module_testbed: Callable[[Topology], Testbed]) -> Testbed:
    return module_testbed(request.module.TOPOLOGY)


@pytest.fixture
def bed(_module_bed: Testbed) -> Iterator[Testbed]:
    """The file's own bed, of its `TOPOLOGY`; whatever a test leaves running in it is ended."""
    yield _module_bed
    kill_all(_module_bed)
