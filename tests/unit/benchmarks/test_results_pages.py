"""Result pages: Markdown from the JSON file of a benchmark."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.report import Report
from benchmarks.results_pages import main, render_page

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
PAGE = """\
# graph: a model in three stages

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


def test_a_page() -> None:
    assert render_page("graph", CONTENT) == PAGE


def test_a_page_without_checks_and_rows() -> None:
    page = render_page("wan", {"title": "wan", "rows": [], "checks": []})
    assert page == "# wan\n\n```\npython -m benchmarks.wan --json FILE\n```\n"


def test_one_page_for_each_file_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("planner", rows=[{"machines": 10}])
    report.check("seconds", 0.5, "<= 1")
    report.finish(tmp_path / "planner.json")
    (tmp_path / "graph.json").write_text(json.dumps(CONTENT))
    out = tmp_path / "docs" / "results"
    monkeypatch.setattr(sys, "argv", ["results_pages", "--json-dir", str(tmp_path), "--out", str(out)])
    main()
    assert sorted(path.name for path in out.iterdir()) == ["graph.md", "planner.md"]
    assert (out / "graph.md").read_text() == PAGE
    assert "| seconds | 0.5 | <= 1 | yes |" in (out / "planner.md").read_text()
