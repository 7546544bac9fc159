"""The package's surface: what each module offers exists, and none of it drags in torch."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys

import pytest

import ravnest.net

MODULES = sorted(f"ravnest.net.{module.name}" for module in pkgutil.iter_modules(ravnest.net.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_offers(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    assert set(module.__all__) <= set(vars(module))


def test_links_need_no_torch() -> None:
    code = f"import sys, {', '.join(MODULES)}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0
