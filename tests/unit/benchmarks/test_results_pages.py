"""Result pages: Markdown from the JSON file of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results_pages import MARKER, RESULTS, page_text

CONTENT = {
    "title": "graph: a model in three stages",
    "machine": {"cpu": "x86_64", "torch": "2.13.0"},
    "rows": [
        {"model": "gpt", "ops": 138, "step_ratio": 0.99512},
        {"model": "bert", "ops": 186, "step_ratio": None},
        {"model": "gpt2_xl", "file_bytes": 154895.0},
    ],
    "checks": [
        {"name": "|loss difference|", "value": 0.0, "target": "<= 0", "ok": True},
        {"name": "step time / eager", "value": 1.0312, "target": "<= 1.03", "ok": False},
    ],
}
PAGE = f"""\
# graph: a model in three stages

{MARKER}

```
python -m benchmarks.graph --json FILE
```

Measured with cpu x86_64, torch 2.13.0.

## Checks

1 of 2 targets are met.

| name | value | target | ok |
|---|--:|---|---|
| \\|loss difference\\| | 0 | <= 0 | yes |
| step time / eager | 1.03 | <= 1.03 | **no** |

## Results

| model | ops | step_ratio |
|---|--:|--:|
| gpt | 138 | 0.995 |
| bert | 186 |  |

| model | file_bytes |
|---|--:|
| gpt2_xl | 154895 |
"""


def test_a_new_page_has_the_title() -> None:
    assert page_text("graph", "", CONTENT) == PAGE


def test_the_text_before_the_marker_is_kept() -> None:
    first = page_text("graph", "# My title\n\nMy words.\n", CONTENT)
    assert first == PAGE.replace("# graph: a model in three stages", "# My title\n\nMy words.")
    assert page_text("graph", first, CONTENT) == first


@pytest.mark.parametrize("path", sorted((RESULTS / "data").glob("*.json")), ids=lambda path: path.stem)
def test_the_pages_show_the_newest_results(path: Path) -> None:
    page = RESULTS / f"{path.stem}.md"
    assert page.read_text() == page_text(path.stem, page.read_text(), json.loads(path.read_text()))
