"""Finished runs from their folders: incomplete files, and reports that run nothing but their own script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ravnest.coordinator import events as on
from ravnest.dashboard.history import RunHistory
from ravnest.dashboard.report import FinishedRun, write_report
from ravnest.dashboard.site import static_files

RunCli = Callable[..., tuple[int, str, str]]
HOSTILE = "</script><script>alert(1)</script><!--"


def folder(path: Path, *, name: str = "ann") -> Path:
    """The folder of a run that ended, with two steps."""
    history = RunHistory()
    history.add_plan("c1", [name, "bob"], [1.0, 1.0], {"stages": []})
    history.add_event(on.NodeLost(5.0, name, "silent", is_voluntary=False))
    run = {"name": "r", "steps": 9, "steps_done": 2, "end_reason": "done"}
    history.save(path, {"run": json.dumps(run).encode(), f"node/{name}": json.dumps({"name": name}).encode()}, 9.0)
    lines = [
        {"step": i, "cluster": "c1", "loss": 3.0 - i, "seconds": i, "samples": 4, "stages": [{"stage": 0}]}
        for i in (1, 2)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def data_of(report: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', report, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_folder_and_a_file_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no directory .*nowhere: give the directory of a run"):
        FinishedRun(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no metrics of a run: give the directory of a run"):
        FinishedRun(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be written to .*report.html: No such file or directory; choose"):
        write_report(folder(tmp_path), tmp_path / "nowhere" / "report.html")


def test_a_torn_last_line_costs_that_line(tmp_path: Path) -> None:
    folder(tmp_path)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "cluster": "c1", "lo\xff')
    run = FinishedRun(tmp_path)
    assert [point[0] for point in run.history.steps.points] == [1, 2]
    assert json.loads(run.report())["document"]["set"]["run"]["end_reason"] == "done"


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_run_that_was_killed_before_it_saved_has_its_curves_and_plan(is_torn: bool, tmp_path: Path) -> None:
    folder(tmp_path)
    if is_torn:
        (tmp_path / "dashboard.json").write_bytes((tmp_path / "dashboard.json").read_bytes()[:50])
    else:
        (tmp_path / "dashboard.json").unlink()
    plan = {"clusters": {"c1": {"stages": [{"node": "ann"}, {"node": "bob"}]}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    document = json.loads(FinishedRun(tmp_path).report())["document"]
    assert document["set"]["run"]["steps_done"] == 2
    assert "not recorded" in document["set"]["run"]["end_reason"]
    assert document["set"]["plan/c1"]["members"] == ["ann", "bob"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, run_cli: RunCli) -> None:
    code, _, errors = run_cli("dashboard", tmp_path, "--no-browser")
    assert code == 2
    assert "has no metrics of a run" in errors
    code, _, errors = run_cli("dashboard", "rav1-abc", "--export", tmp_path / "report.html")
    assert (code, "--export needs the directory of a run" in errors) == (2, True)


def test_a_report_allows_its_own_script_and_style_only(tmp_path: Path, run_cli: RunCli) -> None:
    path = tmp_path / "report.html"
    assert run_cli("dashboard", folder(tmp_path, name=HOSTILE), "--export", path)[0] == 0
    text = path.read_text()
    assert HOSTILE not in text
    assert data_of(text)["document"]["set"][f"node/{HOSTILE}"]["name"] == HOSTILE
    assert data_of(text)["nodes"][HOSTILE]["points"], "the history of each node"
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    script = re.search(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert policy is not None
    assert script is not None
    assert style is not None
    for kind, found in (("script-src", script[1]), ("style-src", style[1])):
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert not re.search(r"""(?:src|href)=["'](?!#|data:,)""", text), "nothing is loaded"
    assert not re.search(r"^(?:import|export) ", script[1], re.MULTILINE)


def test_modules_can_become_one_script() -> None:
    """No name is defined by two modules: a report joins them."""
    homes: dict[str, list[str]] = {}
    for name, content in static_files().items():
        if name.endswith(".js"):
            for found in re.findall(
                r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)", content.decode(), re.M
            ):
                homes.setdefault(found, []).append(name)
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_names_never_become_markup() -> None:
    for name, content in static_files().items():
        for forbidden in (
            b"innerHTML",
            b"outerHTML",
            b"insertAdjacentHTML",
            b"document.write",
            b"eval(",
            b"http://",
            b"https://",
        ):
            allowed = name == "dom.js" and forbidden == b"http://"  # the namespace of SVG
            assert forbidden not in content or allowed or name == "icon.svg", f"{name}: {forbidden.decode()}"


def test_writing_a_report_of_a_run_without_any_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    write_report(tmp_path, tmp_path / "report.html")
    assert data_of((tmp_path / "report.html").read_text())["document"]["set"]["run"]["steps_done"] == 0
