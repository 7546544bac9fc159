"""Finished runs: their pages from the files of a folder, live from a small server or as one HTML file.

The file holds data, styles and scripts, loads nothing and sends nothing: its Content-Security-Policy allows only the
one script and the one style sheet in it, by their digests.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from ravnest.dashboard.document import LiveDocument
from ravnest.dashboard.history import PlanRow, RunHistory, Saved, load_saved, read_lines
from ravnest.dashboard.site import HEADERS, static_files
from ravnest.dashboard.stream import Stream
from ravnest.errors import RequestRejected

__all__ = ["FinishedRun", "write_report"]

_MAX_NODES = 200  # with a history in a report
_UNKNOWN_END = "its end is not recorded: the process was killed, or it is still running"
_SCRIPTS = (
    "format", "dom", "chart", "store", "page_run", "page_plan", "page_fleet", "page_node", "page_contributions",
    "page_access", "main",
)  # fmt: skip


class FinishedRun:
    """The data of a run's folder, for the pages. Raises `ValueError` if the folder has no metrics of a run."""

    def __init__(self, folder: Path) -> None:
        saved = load_saved(folder)
        if not folder.is_dir():
            raise ValueError(f"there is no directory {folder}: give the directory of a run")
        if saved is None and not (folder / "metrics.jsonl").is_file():
            raise ValueError(f"{folder} has no metrics of a run: give the directory of a run")
        self.history = RunHistory(saved)
        for line in read_lines(folder / "metrics.jsonl"):
            self.history.add_line(line)
        self._values = {**_plans(folder), **_values(saved or Saved(), self.history, folder.name)}
        self._document = LiveDocument(self.history)
        self._document.update(self._values)
        self._stream = Stream(self._document, lambda: (self._values, ""))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        return await self._stream.serve(request, HEADERS)

    async def node(self, name: str) -> bytes:
        return msgspec.json.encode(self.history.node(name))

    async def access(self) -> bytes:
        return msgspec.json.encode({"viewer_link": "", "addresses": {}, "rejections": [], "num_rejected": 0})

    async def metrics(self) -> bytes:
        raise RequestRejected("this run is over: it has no live metrics", 404)

    async def close(self) -> None:
        self._stream.close()

    def report(self) -> bytes:
        """Return the data of a report, as JSON."""
        run = msgspec.json.decode(self._document.encoded["run"])
        nodes = {name: self.history.node(name) for name in list(self.history.nodes)[:_MAX_NODES]}
        return msgspec.json.encode(
            {"document": msgspec.Raw(self._document.snapshot()), "nodes": nodes, "state": run["end_reason"]}
        )


def _values(saved: Saved, history: RunHistory, name: str) -> dict[str, Any]:
    """Return the last values that the run has saved, and what its metrics tell if there are none."""
    values: dict[str, Any] = dict(saved.document)
    values |= {f"event/{row.number}": row for row in history.events}
    run: dict[str, Any] = {"name": name, "steps": None, "steps_done": 0, "end_reason": None}
    if "run" in saved.document:
        run |= msgspec.json.decode(saved.document["run"])
    last = history.steps.points[-1][0] if history.steps.points else None
    run["steps_done"] = max(run["steps_done"], int(last or 0))
    return {**values, "run": {**run, "labels": history.labels, "end_reason": run["end_reason"] or _UNKNOWN_END}}


def _plans(folder: Path) -> dict[str, Any]:
    """Return the plans in `plan.json`: a run that was killed early has saved no others."""
    plans: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        for name, content in json.loads((folder / "plan.json").read_text())["clusters"].items():
            members = tuple(str(stage["node"]) for stage in content["stages"])
            plans[f"plan/{name}"] = PlanRow(members=members, shares=(), content=content)
    return plans


def write_report(folder: Path, path: Path) -> None:
    """Write the pages of a run's folder into one HTML file."""
    report = _report(FinishedRun(folder).report())
    try:
        path.write_bytes(report)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"the report cannot be written to {path}: {reason}; choose another file") from error


def _report(data: bytes) -> bytes:
    files = static_files()
    script = "\n".join(_plain_script(files[f"{name}.js"].decode()) for name in _SCRIPTS).replace("</", "<\\/")
    style = files["style.css"].decode()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = files["index.html"].decode()
    page = re.sub(r"<script [^>]*></script>\n", "", page)
    page = page.replace('<link rel="icon" href="assets/icon.svg">', '<link rel="icon" href="data:,">')
    page = page.replace('<link rel="stylesheet" href="assets/style.css">', f"<style>{style}</style>")
    meta = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', meta)
    inert = data.decode().replace("<", "\\u003c")  # valid in JSON texts only, and `<` occurs in no other place
    end = (
        f'<script type="application/json" id="data">{inert}</script>\n<script type="module">{script}</script>\n</body>'
    )
    return page.replace("</body>", end).encode()


def _plain_script(text: str) -> str:
    """Return a module without its imports and exports: all modules become one."""
    text = re.sub(r"^import [^;]*;\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^export ", "", text, flags=re.MULTILINE)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
