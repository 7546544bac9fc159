"""Make `import torchvision` work beside a torch build that cannot load torchvision's compiled operators.

The Linux wheels of torchvision on PyPI are CUDA builds. Beside a CPU build of torch their operators do not load, and
the import, which transformers does as well, ends with "operator torchvision::nms does not exist". Models need none
of these operators; the import needs the two schemas below. Detection operators still raise torchvision's own error.

`make setup` runs this file when torchvision does not import. It copies itself into site-packages, next to a .pth file
that imports it whenever Python starts: an import hook, which imports torch only when torchvision is imported.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

_NAMES = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[Any] = []  # a torch Library takes its schemas back when it is freed


class _DeclareOperators:
    """Declares the schemas just before torchvision registers their fake kernels, then lets the import continue."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(cls)
            _declare_operators()


def _declare_operators() -> None:
    import torch

    missing = [name for name in _NAMES if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in missing:
            library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
        _libraries.append(library)


def _install() -> None:
    site_packages = Path(sysconfig.get_path("purelib"))
    shutil.copy(__file__, site_packages)
    (site_packages / f"{Path(__file__).stem}.pth").write_text(f"import {Path(__file__).stem}\n")


if __name__ == "__main__":
    _install()
else:
    sys.meta_path.insert(0, _DeclareOperators)
