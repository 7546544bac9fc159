"""Measures the dashboard: what viewers cost the coordinator of 1,000 nodes, and how quick and small the page is.

    viewers     processor time of the coordinator with 1,000 simulated agents that train, without and with 20 viewers,
                in turns; then a page in Chromium: first paint, and the delay of an event until the page shows it
    long run    a page that sees 30 minutes of a run of 1,000 nodes, as many changes as in real time but faster: memory
    flood       a local run with and without a flood of requests to its dashboard, in turns

Needs Chromium and Linux.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.control.__main__ import Durations, cpu_over, heartbeats, join_all, leases, wait_until
from benchmarks.control.__main__ import plan as plan_agents
from benchmarks.control.child import Child
from benchmarks.dashboard.chromium import CHROMIUM
from benchmarks.dashboard.pages import measure_memory, measure_times
from benchmarks.dashboard.training import measure_flood
from benchmarks.report import Report, arguments
from ravnest.core.config import config, require

_INTERVAL_S = 0.5  # of a real dashboard
_FAST_S = 0.05


@config
class Sizes:
    """The extent of each part."""

    agents: int = 1000
    viewers: int = 20
    turns: int = 3
    turn_s: float = 10.0
    loads: int = 5
    marks: int = 40
    minutes: float = 30.0
    flood_pairs: int = 40
    flood_s: float = 3.0


_QUICK = Sizes(agents=100, turns=1, turn_s=5.0, loads=2, marks=10, minutes=2.0, flood_pairs=6, flood_s=2.0)


def main() -> None:
    options = arguments(__doc__).parse_args()
    require(CHROMIUM is not None, "Chromium is not installed: apt-get install chromium")
    sizes = _QUICK if options.quick else Sizes()
    report = Report("dashboard: viewers, pages and a flood of requests")
    add_viewers(report, sizes)
    add_long_run(report, sizes)
    add_flood(report, sizes)
    report.finish(options.json)


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def add_viewers(report: Report, sizes: Sizes) -> None:
    """Measure the coordinator and a page with simulated agents that train."""
    durations, row = Durations(heartbeat_s=6.0, heartbeats_s=2.0, leases_s=5.0), dict[str, Any](agents=sizes.agents)
    with (
        tempfile.TemporaryDirectory() as folder,
        Child("benchmarks.control.agents", str(Path(folder) / "agents")) as agents,
        Child("benchmarks.dashboard.service", str(Path(folder) / "coordinator"), str(_INTERVAL_S)) as service,
        Child("benchmarks.dashboard.viewers") as client,
    ):
        for phase in (join_all, heartbeats, plan_agents, leases):
            phase(row, service, agents, durations)
            _log(f"{sizes.agents} agents: {phase.__name__} done")
        link = service.request("link")
        shares: dict[int, list[float]] = {0: [], sizes.viewers: []}
        for _ in range(sizes.turns):
            for viewers in shares:
                if viewers:
                    client.request("watch", link=link, count=viewers)
                cpu_s, seconds = cpu_over(service, sizes.turn_s)
                shares[viewers].append(100 * cpu_s / seconds)
                received = client.request("stop")["bytes"]
                wait_until(service, lambda _: service.request("pushed") == 0)
                _log(f"{viewers} viewers: {shares[viewers][-1]:.1f} % of a core")
        few, many = (statistics.median(values) for values in shares.values())
        times = measure_times(service, link, loads=sizes.loads, marks=sizes.marks)
        report.rows.append({
            "agents": sizes.agents, "leases/s": row["leases/s"], "viewers": sizes.viewers, "cpu % without": few,
            "cpu % with": many, "kB/s per viewer": received / sizes.turn_s / sizes.viewers / 1e3,
            "first paint s": times.paint_s, "update p50 s": statistics.median(times.delays_s),
            "update p95 s": times.delay_p95_s,
        })  # fmt: skip
        service.request("close")
    report.check(f"{sizes.viewers} viewers of {sizes.agents} nodes, % of a core more", many - few, "<= 5")
    report.check("page: event until it is shown, p95 s", times.delay_p95_s, "<= 1")
    report.check("page: first paint, median s", times.paint_s, "<= 1")


def add_long_run(report: Report, sizes: Sizes) -> None:
    """Measure the memory of a page during a long run."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Child("benchmarks.dashboard.service", str(Path(folder) / "coordinator"), str(_FAST_S)) as service,
    ):
        service.request("open", count=10**6, wait_s=10**6, heartbeat_s=10**6)
        service.request("populate", count=sizes.agents)
        service.request("feed", seconds=60 * sizes.minutes, pause_s=_FAST_S)
        rows = measure_memory(service, service.request("link"), sizes.minutes, _log)
    report.rows += [{"minutes": row.minutes, "script MB": row.heap_mb, "page MB": row.process_mb} for row in rows]
    name = f"page: memory after {sizes.minutes:g} minutes of {sizes.agents} nodes, MB"
    report.check(name, rows[-1].process_mb, "<= 150")


def add_flood(report: Report, sizes: Sizes) -> None:
    """Measure a local run during a flood of requests."""
    measured = measure_flood(sizes.flood_s, sizes.flood_pairs, _log)
    for name, turns in (("no", measured.quiet), ("yes", measured.flood)):
        answers = measured.answers if name == "yes" else {}
        report.rows.append({
            "flood": name, "steps/s": statistics.median(turns.rates),
            "ms of a core per step": 1e3 * turns.worker_s / turns.steps,
            "idle % of the core": 100 * turns.idle_s / turns.seconds,
            "cpu % of the coordinator": 100 * turns.own_s / turns.seconds,
            "answers/s": sum(answers.values()) / turns.seconds, "with data/s": answers.get("200", 0) / turns.seconds,
        })  # fmt: skip
    report.rows.append({
        "share of the speed": measured.share, "standard error": measured.standard_error,
        "share by processor time": measured.share_of_work, "pairs of turns": len(measured.ratios),
    })  # fmt: skip
    report.check("flood of requests: share of the speed of training", measured.share, ">= 0.98")


if __name__ == "__main__":
    main()
