"""A run in a notebook: well-formed, self-contained and escaped, whatever the files of its folder hold."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ravnest.coordinator import events as on
from ravnest.dashboard.history import RunHistory
from ravnest.run.html import folder_html

HOSTILE = '"><script>alert(1)</script><img src="https://example.org/x.png" onerror=alert(1)>'
STAGE = {
    "first_op": 0, "num_ops": 3, "parameter_bytes": 4, "memory_bytes": 8, "seconds": 0.5, "sends_bytes": 2,
}  # fmt: skip


def write(folder: Path, lines: list[dict[str, Any]], *, node: str = "ann", rest: str = "") -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)
    plan = {"stages": [{"node": node, **STAGE}], "samples_per_s": 12.0}
    (folder / "plan.json").write_text(json.dumps({"clusters": {"c1": plan}}))
    return folder


def steps(*losses: float) -> list[dict[str, Any]]:
    return [{"step": i, "loss": loss, "seconds": float(i), "samples": 4} for i, loss in enumerate(losses, 1)]


def shown(folder: Path, state: str = "finished") -> ElementTree.Element:
    """The tree of the HTML, which is also well-formed XML."""
    text = folder_html(folder, state)
    assert "http" not in text
    return ElementTree.fromstring(text)


def words(tree: ElementTree.Element) -> str:
    return " ".join("".join(tree.itertext()).split())


def test_curves_plan_and_numbers(tmp_path: Path) -> None:
    lines = [*steps(3.0, 2.0, 1.5), {"evaluation": 3, "loss": 1.75, "seconds": 3.5}]
    tree = shown(write(tmp_path, lines))
    lines_drawn = tree.findall(".//polyline")
    assert [len(line.attrib["points"].split()) for line in lines_drawn] == [3, 1]
    heights = [float(point.split(",")[1]) for point in lines_drawn[0].attrib["points"].split()]
    assert heights == sorted(heights), "a falling loss falls"
    text = words(tree)
    assert "finished, step 3, loss 1.5, held-out loss 1.75, 4.0 samples/s" in text
    assert "cluster c1: 12 samples/s expected" in text
    assert tree.findall(".//td")[0].text == "ann"


def test_names_and_events_are_escaped(tmp_path: Path) -> None:
    history = RunHistory()
    history.add_event(on.NodeLost(0.0, HOSTILE, HOSTILE, False))
    history.save(tmp_path, {}, 0.0)
    text = folder_html(write(tmp_path, steps(2.0, 1.0), node=HOSTILE), HOSTILE)
    tags: set[str] = set()

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.add(tag)
            assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)

    Tags().feed(text)
    assert not tags & {"script", "img", "link", "style", "iframe"}
    assert text.count("&lt;script&gt;") >= 3


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "no step is done"),
        (steps(2.0), "step 1, loss 2"),
        (steps(float("nan"), float("inf"), 2.0), "step 3, loss 2"),
        (steps(2.0, float("nan")), "step 2, loss not finite"),
        (steps(1.0, 1.0, 1.0), "loss 1"),
        (steps(1e-30, 1e30), "loss 1e+30"),
    ],
    ids=str,
)
def test_unusual_losses(lines: list[dict[str, Any]], expected: str, tmp_path: Path) -> None:
    assert expected in words(shown(write(tmp_path, lines)))


def test_torn_and_missing_files(tmp_path: Path) -> None:
    assert len(shown(write(tmp_path, steps(3.0, 2.0), rest='{"step": 3, "lo')).findall(".//polyline")) == 1
    for broken in ("", "[]", '{"clusters": {"c1": {}}}', '{"clusters": 3}'):
        (tmp_path / "plan.json").write_text(broken)
        assert shown(tmp_path).find(".//table") is None
    (tmp_path / "dashboard.json").write_text("{")
    assert "training" in words(shown(tmp_path, "training"))
    (tmp_path / "metrics.jsonl").unlink()
    assert "no step is done" in words(shown(tmp_path))
    assert "not started" in folder_html(None, "not started")


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    write(tmp_path, steps(*(1 + 1 / k for k in range(1, 20_000))))
    assert len(folder_html(tmp_path, "finished")) < 100_000
