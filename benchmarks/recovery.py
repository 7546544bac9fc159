"""What a failure costs: `python -m benchmarks.recovery --json out.json`.

On the testbed two clusters of three PCs and a spare train a small GPT. PCs are killed, then lines are cut for good,
`TURNS` times each: how long until the coordinator knows, until both clusters are at full speed again, what was lost or
done twice, and what the other cluster noticed of it. Of seconds the worst of all turns counts; of speeds all turns
together, before and after, for this machine is not equally fast at all times. Then PCs are killed and join at random,
every 30 s, for `--minutes` in `STRETCHES` stretches, no more than two of them gone at a time: how much of the
undisturbed speed is left, which is measured before and after each.
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

from benchmarks.recovery_fleet import CLUSTERS, PCS, Fleet, Hung, topology
from benchmarks.recovery_job import BATCH, Task
from benchmarks.report import Report, arguments
from ravnest.testbed import Testbed

CPU = 0.15  # of a core for each PC: seven of them, the requester, its planner and the internet fit into two
TASK = Task(width=64, layers=3, context=32)
OPTIONS = ("--average-every", "64", "--steps", "1000000")
STEADY_S, QUICK_S, CALM_S = 20.0, 5.0, 60.0  # that a speed is measured
PATIENCE_S = 180.0
TURNS = 4
MOST_PLANS = 5
SETTLE_S = 8.0
WINDOW_S = 5.0
CHURN_S, MOST_GONE, STRETCHES = 30.0, 2, 4


@dataclass(frozen=True)
class Blow:
    """What one failure did. Rates are of both clusters, samples/s."""

    victim: str
    detected_s: float
    full_speed_s: float
    returned: int
    repeated: int
    before: float
    after: float
    other_undisturbed: float  # of the other cluster alone, before and after
    other_meanwhile: float


class Rates:
    """Samples per second from a run's own log, by the moments at which its lines were seen."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._seen = fleet, 0
        self._steps: list[tuple[float, str]] = []  # when, and which cluster

    def look(self) -> None:
        self._fleet.watch.look()
        lines = self._fleet.watch.lines
        now_s = time.monotonic()
        self._steps += [(now_s, line["cluster"]) for line in lines[self._seen :] if "step" in line]
        self._seen = len(lines)

    def between(self, start_s: float, end_s: float, cluster: str | None = None) -> float:
        """From the last step before to the first step after, as far as there are any: steps are few."""
        times_s = [at_s for at_s, name in self._steps if cluster in (None, name)]
        since_s = max((at_s for at_s in times_s if at_s < start_s), default=start_s)
        until_s = min((at_s for at_s in times_s if at_s >= end_s), default=end_s)
        num = sum(since_s < at_s <= until_s for at_s in times_s)
        return num * BATCH / max(until_s - since_s, 1e-9)

    def pause(self, seconds: float) -> tuple[float, float]:
        """Let time pass; from when to when. What was logged before, unseen, does not count."""
        self.look()
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds:
            self.look()
            time.sleep(0.02)
        return start_s, time.monotonic()


def calm(fleet: Fleet, rates: Rates, seconds: float) -> tuple[float, float]:
    """From when to when both clusters trained, and nobody made other plans."""
    for _ in range(MOST_PLANS):
        fleet.wait_until(lambda: len(fleet.clusters()) == CLUSTERS, PATIENCE_S, "another cluster")
        before = [cluster.id for cluster in fleet.clusters()]
        found = rates.pause(seconds)
        if [cluster.id for cluster in fleet.clusters()] == before:
            return found
    raise Hung(f"there were always other plans\n{fleet.said()[-4000:]}")


def strike(fleet: Fleet, rates: Rates, how: str, steady_s: float) -> Blow:
    """To the middle of the first cluster."""
    steady = calm(fleet, rates, steady_s)
    hit, other = fleet.clusters()
    victim = hit.stages[1].name
    leases = _leases(fleet)
    injector = fleet.strike(f"{how.format(victim)} at step {fleet.watch.look().steps + 1}")
    began_s = injector.begun[0][0]

    def is_detected() -> bool:
        rates.look()
        return f"cluster {hit.id} is lost" in fleet.said()[-20_000:]

    fleet.wait_until(is_detected, PATIENCE_S, "word of the failure", injector)
    detected_s = time.monotonic()
    before = rates.between(*steady)

    def is_fast() -> bool:
        rates.look()
        since_s = time.monotonic() - WINDOW_S
        return since_s > detected_s and rates.between(since_s, time.monotonic()) >= 0.9 * before

    fleet.wait_until(is_fast, PATIENCE_S, f"full speed, which was {before:.3g} samples/s,", injector)
    full_s = time.monotonic() - WINDOW_S  # it has been so for as long
    later = calm(fleet, rates, steady_s)
    now = _leases(fleet)
    undisturbed = (rates.between(*steady, other.id) + rates.between(*later, other.id)) / 2
    return Blow(
        victim, detected_s - began_s, full_s - began_s, now[0] - leases[0], now[1] - leases[1], before,
        rates.between(*later), undisturbed, rates.between(began_s, full_s, other.id),
    )  # fmt: skip


def put_right(fleet: Fleet, victim: str, how: str) -> None:
    """It is there again, as a spare."""
    if how.startswith("kill"):
        fleet.join(victim)
    else:
        fleet.bed.restore(victim)
    fleet.goes_on(5, PATIENCE_S)
    fleet.settle(SETTLE_S)


def _leases(fleet: Fleet) -> tuple[int, int]:
    assert fleet.status is not None
    return fleet.status.leases.returned, fleet.status.leases.repeated


def churn(fleet: Fleet, rates: Rates, minutes: float, seed: int = 0) -> list[dict[str, Any]]:
    """In stretches, with all PCs there before and after each: this machine is not equally fast at all times."""
    rng, rows = random.Random(seed), list[dict[str, Any]]()
    before = rates.between(*calm(fleet, rates, CALM_S))
    for number in range(STRETCHES):
        leases = _leases(fleet)
        kills, during, longest_s = stretch(fleet, rates, minutes / STRETCHES, rng)
        now = _leases(fleet)
        fleet.settle(SETTLE_S)
        after = rates.between(*calm(fleet, rates, CALM_S))
        rows.append({
            "churn": f"{number + 1} of {STRETCHES}", "kills": kills, "samples/s before": before, "during": during,
            "after": after, "goodput": 2 * during / (before + after), "longest pause s": longest_s,
            "given back": now[0] - leases[0], "trained twice": now[1] - leases[1],
        })  # fmt: skip
        sys.stderr.write(f"churn, {number + 1} of {STRETCHES}: {rows[-1]['goodput']:.3g} of undisturbed\n")
        before = after
    return rows


def stretch(fleet: Fleet, rates: Rates, minutes: float, rng: random.Random) -> tuple[int, float, float]:
    """A random kill or join every half minute; at most `MOST_GONE` are gone, so that one cluster's PCs are there.

    How many were killed, the samples/s, and the longest time without a step. In the end all are there again.
    """
    gone, kills = list[str](), 0
    start_s = time.monotonic()
    longest_s = last_s = 0.0
    steps = fleet.watch.look().steps
    while time.monotonic() < start_s + 60 * minutes:
        if gone and (len(gone) >= MOST_GONE or rng.random() < 0.5):
            fleet.join(gone.pop(rng.randrange(len(gone))))
        else:
            gone.append(rng.choice([name for name in PCS if name not in gone]))
            fleet.bed.kill(gone[-1])
            kills += 1
        until_s = time.monotonic() + CHURN_S
        last_s = time.monotonic()
        while time.monotonic() < until_s:
            rates.pause(0.2)
            if (now := fleet.watch.look().steps) > steps:
                steps, last_s = now, time.monotonic()
            longest_s = max(longest_s, time.monotonic() - last_s)
    during = rates.between(start_s, time.monotonic())
    fleet.join(*gone)
    fleet.goes_on(5, PATIENCE_S)
    return kills, during, longest_s


def _tell(report: Report, name: str, target: str, blows: Sequence[Blow]) -> None:
    """Each blow; checked are the worst seconds, and speeds of all blows together."""
    for blow in blows:
        report.rows.append({
            "failure": name, "detected s": blow.detected_s, "full speed s": blow.full_speed_s,
            "given back": blow.returned, "trained twice": blow.repeated, "samples/s before": blow.before,
            "after": blow.after, "other cluster undisturbed": blow.other_undisturbed,
            "meanwhile": blow.other_meanwhile,
        })  # fmt: skip
    before, after = sum(blow.before for blow in blows), sum(blow.after for blow in blows)
    undisturbed = sum(blow.other_undisturbed * blow.full_speed_s for blow in blows)
    meanwhile = sum(blow.other_meanwhile * blow.full_speed_s for blow in blows)
    report.check(f"{name}: seconds to detection", max(blow.detected_s for blow in blows), target)
    report.check(f"{name}: speed afterwards, of before", after / before, ">= 0.9")
    report.check(f"{name}: the other cluster meanwhile, of undisturbed", meanwhile / undisturbed, ">= 0.95")


def measure(
    report: Report, folder: Path, *, kinds: Sequence[tuple[str, str, str]], turns: int, minutes: float, steady_s: float
) -> None:
    with Testbed(topology()) as bed:
        fleet = Fleet(bed, folder, TASK, OPTIONS, cpu=CPU)
        try:
            fleet.join(*PCS)
            fleet.goes_on(5, PATIENCE_S)
            fleet.settle(SETTLE_S)
            rates = Rates(fleet)
            for number, (name, how, target) in enumerate(kinds):
                blows = list[Blow]()
                for turn in range(turns):
                    blows.append(strike(fleet, rates, how, steady_s))
                    told = f"full speed after {blows[-1].full_speed_s:.3g} s"
                    sys.stderr.write(f"{name}, {turn + 1} of {turns}: {told}\n")
                    if minutes or number + 1 < len(kinds) or turn + 1 < turns:
                        put_right(fleet, blows[-1].victim, how)
                _tell(report, name, target, blows)
            if minutes:
                rows = churn(fleet, rates, minutes)
                report.rows += rows
                undisturbed = sum(row["samples/s before"] + row["after"] for row in rows) / 2
                report.check("churn: samples/s, of undisturbed", sum(r["during"] for r in rows) / undisturbed, ">= 0.8")
                report.check("churn: longest pause, seconds", max(r["longest pause s"] for r in rows), "<= 30")
            report.check("moments at which leases did not balance", len(fleet.problems), "== 0")
        finally:
            fleet.close()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of churn; 0: none")
    parser.add_argument("--only", choices=("failures", "churn"), help="one part alone")
    asked = parser.parse_args()
    kinds = [("kill -9 of a PC", "kill {}", "<= 2"), ("line cut for good", "cut {} for good", "<= 6")]
    report = Report("What a failure costs two clusters of three PCs with a spare")
    with tempfile.TemporaryDirectory(prefix="ravnest-recovery-") as folder:
        if asked.quick:
            measure(report, Path(folder), kinds=kinds[:1], turns=1, minutes=0.0, steady_s=QUICK_S)
        else:
            if asked.only == "churn":
                kinds = []
            minutes = 0.0 if asked.only == "failures" else asked.minutes
            measure(report, Path(folder), kinds=kinds, turns=TURNS, minutes=minutes, steady_s=STEADY_S)
    report.finish(asked.json)


if __name__ == "__main__":
    main()
