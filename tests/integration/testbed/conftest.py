"""Fixtures that start testbeds, or skip the test and name what this machine lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from testbed import Testbed, TestbedUnavailable, Topology, missing
from tests.integration.testbed.running import kill_all


@pytest.fixture(scope="session")
def _lacking() -> list[str]:
    return missing()


@pytest.fixture
def machine(_lacking: list[str]) -> None:
    """Skip the test unless this machine can run a testbed."""
    if _lacking:
        pytest.skip(str(TestbedUnavailable(_lacking)))


@pytest.fixture
def make_testbed(machine: None) -> Iterator[Callable[[Topology], Testbed]]:
    """Start testbeds that end with the test."""
    with ExitStack() as stack:
        yield lambda topology: stack.enter_context(Testbed(topology))


@pytest.fixture(scope="module")
def module_testbed(_lacking: list[str]) -> Iterator[Callable[[Topology], Testbed]]:
    """Start testbeds that end with the last test of the file."""
    if _lacking:
        pytest.skip(str(TestbedUnavailable(_lacking)))
    with ExitStack() as stack:
        yield lambda topology: stack.enter_context(Testbed(topology))


@pytest.fixture(scope="module")
def _file_testbed(request: pytest.FixtureRequest, module_testbed: Callable[[Topology], Testbed]) -> Testbed:
    return module_testbed(request.module.TOPOLOGY)


@pytest.fixture
def testbed(_file_testbed: Testbed) -> Iterator[Testbed]:
    """A testbed of the file's `TOPOLOGY`, shared by its tests; processes that a test leaves running are killed."""
    yield _file_testbed
    kill_all(_file_testbed)
