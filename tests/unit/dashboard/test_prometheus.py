"""`/metrics` over real HTTP: its format, its access, hostile names."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from ravnest.coordinator import events as on
from ravnest.dashboard.live import METRICS_TOKEN_FILE
from ravnest.dashboard.report import FinishedRun
from ravnest.errors import RequestRejected
from tests.unit.coordinator.attacks import run
from tests.unit.dashboard.served import served

LABEL = r'[a-z_]+="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
LINE = re.compile(rf"(ravnest_[a-z_]+)(\{{{LABEL}(?:,{LABEL})*\}})? (-?[0-9.e+-]+)")


def samples(text: str) -> dict[str, float]:
    """The samples of a scrape; every line has the text format, and every metric its type before its samples."""
    found: dict[str, float] = {}
    typed: set[str] = set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert line.split(" ")[2] not in typed, "samples of a metric stand together"
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind == ("counter" if name.endswith("_total") else "gauge")
            typed.add(name)
        else:
            match = LINE.fullmatch(line)
            assert match is not None, line
            assert match[1] in typed
            assert match[1] + (match[2] or "") not in found
            found[match[1] + (match[2] or "")] = float(match[3])
    return found


def test_a_scrape_has_the_text_format(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server:
            empty = samples((await server.get("/metrics"))[1])
            assert empty["ravnest_steps_total"] == 0
            assert not any("loss" in name for name in empty if "node" not in name), "nothing is trained"
            hostile = 'a"b\\c{d}=1,\nravnest_loss 7'
            server.connect("ann", hostile)
            server.plan("c1", "ann", hostile)
            stages = [
                {"stage": 0, "updates": 3, "busy_s": 1.5, "idle_s": float("nan"), "staleness": {0: 1, 1: 2}},
                {"stage": 1, "updates": 3, "sent_bytes": 9},
            ]
            line = {"step": 3, "cluster": "c1", "loss": 0.5, "accuracy": 0.25, "seconds": 2.0, "samples": 12}
            server.dashboard.history.add_line({**line, "stages": stages})
            server.dashboard.history.add_line({"evaluation": 3, "loss": 0.75, "accuracy": 0.5, "seconds": 2.5})
            server.record(on.NodeLost(server.now_s, "ann", "asleep", False))
            found = samples((await server.get("/metrics"))[1])
            escaped = 'a\\"b\\\\c{d}=1,\\nravnest_loss 7'
            assert found["ravnest_loss"] == 0.5
            assert found["ravnest_validation_loss"] == 0.75
            assert found['ravnest_loss_value{name="accuracy",data="validation"}'] == 0.5
            assert found['ravnest_stage_busy_seconds_total{cluster="c1",stage="0",node="ann"}'] == 1.5
            assert found[f'ravnest_stage_sent_bytes_total{{cluster="c1",stage="1",node="{escaped}"}}'] == 9
            assert found['ravnest_stage_gradients_total{cluster="c1",stage="0",node="ann",late="1"}'] == 2
            assert found['ravnest_nodes{state="gone"}'] == 1
            assert found['ravnest_node_losses_total{node="ann"}'] == 1
            assert f'ravnest_node_lent_memory_bytes{{node="{escaped}"}}' in found
            assert not any("idle" in name and 'stage="0"' in name for name in found), "a NaN of a node is left out"

    run(test())


def test_a_scrape_needs_a_token_which_is_in_a_file(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server:
            assert (await server.get("/metrics", headers={}))[0] == 401
            path = tmp_path / "coordinator" / METRICS_TOKEN_FILE
            assert path.stat().st_mode & 0o077 == 0
            headers = {"Authorization": f"Bearer {path.read_text()}"}
            assert headers == await server.viewer_headers(), "it opens no page of the requester"
            assert (await server.get("/metrics", headers=headers))[0] == 200
            async with server.client.get(f"{server.origin}/metrics", headers=headers) as answer:
                assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"

    run(test())


def test_a_finished_run_has_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2, "seconds": 1}\n')
    with pytest.raises(RequestRejected, match="this run is over"):
        asyncio.run(FinishedRun(tmp_path).metrics())
