"""Every file that the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "ravnest"
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
_PATH = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|toml|md))`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_exist(document: Path) -> None:
    for name in _PATH.findall(document.read_text()):
        places = [ROOT / name, PACKAGE / name, document.parent / name, *PACKAGE.glob(f"*/{name}")]
        assert any(place.exists() for place in places), f"{document.name} names {name}, which does not exist"
