"""Measures the cost of failures: time to detection and to full speed, lost work, and goodput under churn.

On the testbed two clusters of three PCs and a spare train a small GPT. PCs are killed, then lines are cut for good,
`TURNS` times each. Measured are the seconds until the coordinator detects the failure and until both clusters are at
full speed again, batches returned or trained twice, and the speed of the other cluster. For seconds the worst turn
counts; for speeds all turns together, before and after, because the speed of the machine varies. Then, under churn,
PCs are killed and join at random every 30 s for `--minutes`, in `NUM_PERIODS` periods, at most two of them gone at a
time: the share of the undisturbed speed that is left, which is measured before and after each period.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery.fleet import CLUSTERS, PCS, Fleet, WaitTimeout, topology
from benchmarks.recovery.job import BATCH, Task
from benchmarks.report import Report, arguments
from testbed import Testbed

CPU = 0.15  # of a core per PC: seven PCs, the requester, its planner and the forwarder fit into two cores
TASK = Task(width=64, layers=3, context=32)
OPTIONS = ("--average-every", "64", "--steps", "1000000")
STEADY_S, QUICK_S, CALM_S = 20.0, 5.0, 60.0  # durations of speed measurements
TIMEOUT_S = 180.0
TURNS = 4
MAX_PLANS = 5
SETTLE_S = 8.0
WINDOW_S = 5.0
CHURN_S, MAX_GONE, NUM_PERIODS = 30.0, 2, 4


@dataclass(frozen=True)
class FailureResult:
    """The effect of one failure. RateMonitor are samples/s of both clusters."""

    victim: str
    detected_s: float
    full_speed_s: float
    returned: int
    repeated: int
    before: float
    after: float
    other_undisturbed: float  # of the other cluster alone, before and after
    other_during: float


class RateMonitor:
    """Samples per second from a run's own metrics, by the times at which lines were read."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._num_read = fleet, 0
        self._steps: list[tuple[float, str]] = []  # time and cluster

    def poll(self) -> None:
        self._fleet.monitor.poll()
        lines = self._fleet.monitor.lines
        now_s = time.monotonic()
        self._steps += [(now_s, line["cluster"]) for line in lines[self._num_read :] if "step" in line]
        self._num_read = len(lines)

    def between(self, start_s: float, end_s: float, cluster: str | None = None) -> float:
        """The rate from the last step before `start_s` to the first step after `end_s`, because steps are rare."""
        times_s = [at_s for at_s, name in self._steps if cluster in (None, name)]
        since_s = max((at_s for at_s in times_s if at_s < start_s), default=start_s)
        until_s = min((at_s for at_s in times_s if at_s >= end_s), default=end_s)
        num = sum(since_s < at_s <= until_s for at_s in times_s)
        return num * BATCH / max(until_s - since_s, 1e-9)

    def observe(self, seconds: float) -> tuple[float, float]:
        """Poll for `seconds`; returns start and end. Lines logged before the start do not count."""
        self.poll()
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds:
            self.poll()
            time.sleep(0.02)
        return start_s, time.monotonic()


def undisturbed_period(fleet: Fleet, rates: RateMonitor, seconds: float) -> tuple[float, float]:
    """Start and end of `seconds` in which both clusters trained without a replan."""
    for _ in range(MAX_PLANS):
        fleet.wait_until(lambda: len(fleet.clusters()) == CLUSTERS, TIMEOUT_S, "all clusters")
        before = [cluster.id for cluster in fleet.clusters()]
        period = rates.observe(seconds)
        if [cluster.id for cluster in fleet.clusters()] == before:
            return period
    raise WaitTimeout(f"replanned in each of {MAX_PLANS} periods\n{fleet.log()[-4000:]}")


def inject(fleet: Fleet, rates: RateMonitor, fault: str, steady_s: float) -> FailureResult:
    """Inject a fault into the middle stage of the first cluster and measure its effect."""
    steady = undisturbed_period(fleet, rates, steady_s)
    hit, other = fleet.clusters()
    victim = hit.stages[1].name
    leases = _leases(fleet)
    injector = fleet.inject(f"{fault.format(victim)} at step {fleet.monitor.poll().steps + 1}")
    began_s = injector.started[0][0]

    def is_detected() -> bool:
        rates.poll()
        return f"cluster {hit.id} failed" in fleet.log()[-20_000:]

    fleet.wait_until(is_detected, TIMEOUT_S, "detection of the failure", injector)
    detected_s = time.monotonic()
    before = rates.between(*steady)

    def is_fast() -> bool:
        rates.poll()
        since_s = time.monotonic() - WINDOW_S
        return since_s > detected_s and rates.between(since_s, time.monotonic()) >= 0.9 * before

    fleet.wait_until(is_fast, TIMEOUT_S, f"full speed ({before:.3g} samples/s)", injector)
    full_s = time.monotonic() - WINDOW_S  # the speed was reached this much earlier
    later = undisturbed_period(fleet, rates, steady_s)
    now = _leases(fleet)
    undisturbed = (rates.between(*steady, other.id) + rates.between(*later, other.id)) / 2
    return FailureResult(
        victim, detected_s - began_s, full_s - began_s, now[0] - leases[0], now[1] - leases[1], before,
        rates.between(*later), undisturbed, rates.between(began_s, full_s, other.id),
    )  # fmt: skip


def repair(fleet: Fleet, victim: str, fault: str) -> None:
    """Undo the fault; the victim becomes a spare."""
    if fault.startswith("kill"):
        fleet.join(victim)
    else:
        fleet.testbed.restore(victim)
    fleet.wait_for_steps(5, TIMEOUT_S)
    fleet.settle(SETTLE_S)


def _leases(fleet: Fleet) -> tuple[int, int]:
    assert fleet.status is not None
    return fleet.status.leases.returned, fleet.status.leases.repeated


def churn(fleet: Fleet, rates: RateMonitor, minutes: float, seed: int = 0) -> list[dict[str, Any]]:
    """Run periods of churn, with all PCs present before and after each, because the machine's speed varies."""
    rng, rows = random.Random(seed), list[dict[str, Any]]()
    before = rates.between(*undisturbed_period(fleet, rates, CALM_S))
    for number in range(NUM_PERIODS):
        leases = _leases(fleet)
        kills, during, longest_s = churn_period(fleet, rates, minutes / NUM_PERIODS, rng)
        now = _leases(fleet)
        fleet.settle(SETTLE_S)
        after = rates.between(*undisturbed_period(fleet, rates, CALM_S))
        rows.append({
            "churn": f"{number + 1} of {NUM_PERIODS}", "kills": kills, "samples/s before": before, "during": during,
            "after": after, "goodput": 2 * during / (before + after), "longest pause s": longest_s,
            "returned": now[0] - leases[0], "trained twice": now[1] - leases[1],
        })  # fmt: skip
        sys.stderr.write(f"churn, {number + 1} of {NUM_PERIODS}: {rows[-1]['goodput']:.3g} of undisturbed\n")
        before = after
    return rows


def churn_period(fleet: Fleet, rates: RateMonitor, minutes: float, rng: random.Random) -> tuple[int, float, float]:
    """Kill or join a random PC every half minute; at most `MAX_GONE` are gone, so that one cluster stays complete.

    Returns the number of kills, the samples/s and the longest time without a step. All PCs are present at the end.
    """
    gone, kills = list[str](), 0
    start_s = time.monotonic()
    longest_s = last_s = 0.0
    steps = fleet.monitor.poll().steps
    while time.monotonic() < start_s + 60 * minutes:
        if gone and (len(gone) >= MAX_GONE or rng.random() < 0.5):
            fleet.join(gone.pop(rng.randrange(len(gone))))
        else:
            gone.append(rng.choice([name for name in PCS if name not in gone]))
            fleet.testbed.kill(gone[-1])
            kills += 1
        until_s = time.monotonic() + CHURN_S
        last_s = time.monotonic()
        while time.monotonic() < until_s:
            rates.observe(0.2)
            if (now := fleet.monitor.poll().steps) > steps:
                steps, last_s = now, time.monotonic()
            longest_s = max(longest_s, time.monotonic() - last_s)
    during = rates.between(start_s, time.monotonic())
    fleet.join(*gone)
    fleet.wait_for_steps(5, TIMEOUT_S)
    return kills, during, longest_s


def _add_results(report: Report, name: str, target: str, results: Sequence[FailureResult]) -> None:
    """Add a row for each failure; check the worst seconds, and the speeds of all failures together."""
    for result in results:
        report.rows.append({
            "failure": name, "detected s": result.detected_s, "full speed s": result.full_speed_s,
            "returned": result.returned, "trained twice": result.repeated, "samples/s before": result.before,
            "after": result.after, "other cluster undisturbed": result.other_undisturbed,
            "other cluster during": result.other_during,
        })  # fmt: skip
    before, after = sum(result.before for result in results), sum(result.after for result in results)
    undisturbed = sum(result.other_undisturbed * result.full_speed_s for result in results)
    during = sum(result.other_during * result.full_speed_s for result in results)
    report.check(f"{name}: seconds to detection", max(result.detected_s for result in results), target)
    report.check(f"{name}: speed afterwards, of before", after / before, ">= 0.9")
    report.check(f"{name}: the other cluster during the failure, of undisturbed", during / undisturbed, ">= 0.95")


def measure(
    report: Report, folder: Path, *, kinds: Sequence[tuple[str, str, str]], turns: int, minutes: float, steady_s: float
) -> None:
    with Testbed(topology()) as testbed:
        fleet = Fleet(testbed, folder, TASK, OPTIONS, cpu=CPU)
        try:
            fleet.join(*PCS)
            fleet.wait_for_steps(5, TIMEOUT_S)
            fleet.settle(SETTLE_S)
            rates = RateMonitor(fleet)
            for number, (name, fault, target) in enumerate(kinds):
                results = list[FailureResult]()
                for turn in range(turns):
                    results.append(inject(fleet, rates, fault, steady_s))
                    message = f"full speed after {results[-1].full_speed_s:.3g} s"
                    sys.stderr.write(f"{name}, {turn + 1} of {turns}: {message}\n")
                    if minutes or number + 1 < len(kinds) or turn + 1 < turns:
                        repair(fleet, results[-1].victim, fault)
                _add_results(report, name, target, results)
            if minutes:
                rows = churn(fleet, rates, minutes)
                report.rows += rows
                undisturbed = sum(row["samples/s before"] + row["after"] for row in rows) / 2
                report.check("churn: samples/s, of undisturbed", sum(r["during"] for r in rows) / undisturbed, ">= 0.8")
                report.check("churn: longest pause, seconds", max(r["longest pause s"] for r in rows), "<= 30")
            report.check("polls at which leases did not balance", len(fleet.problems), "== 0")
        finally:
            fleet.close()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="minutes of churn; 0 for none")
    parser.add_argument("--only", choices=("failures", "churn"), help="only one part")
    options = parser.parse_args()
    kinds = [("kill -9 of a PC", "kill {}", "<= 2"), ("line cut for good", "cut {} for good", "<= 6")]
    report = Report("recovery: failures of two clusters of three PCs with a spare")
    with tempfile.TemporaryDirectory(prefix="ravnest-recovery-") as folder:
        if options.quick:
            measure(report, Path(folder), kinds=kinds[:1], turns=1, minutes=0.0, steady_s=QUICK_S)
        else:
            if options.only == "churn":
                kinds = []
            minutes = 0.0 if options.only == "failures" else options.minutes
            measure(report, Path(folder), kinds=kinds, turns=TURNS, minutes=minutes, steady_s=STEADY_S)
    report.finish(options.json)


if __name__ == "__main__":
    main()
