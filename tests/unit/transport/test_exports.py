"""Exports of the package: each name exists, and no module imports torch."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys

import pytest

import ravnest.transport

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(ravnest.transport.__path__, "ravnest.transport.")
    if not module.ispkg
)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_lists_its_exports(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert set(module.__all__) <= set(vars(module))


def test_links_need_no_torch() -> None:
    code = f"import sys, {', '.join(MODULES)}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0
