"""Fixtures: the members of a run, and each kind of link."""

from __future__ import annotations

import pytest

from tests.unit.transport.kinds import Kind, Members, MemoryKind, TlsKind, UnixKind


@pytest.fixture(scope="session")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return Members(tmp_path_factory.mktemp("members"))


@pytest.fixture(params=["memory", "unix", "tls"])
def kind(request: pytest.FixtureRequest, members: Members) -> Kind:
    kinds: dict[str, Kind] = {"memory": MemoryKind(), "unix": UnixKind(), "tls": TlsKind(members)}
    return kinds[request.param]
