"""One real coordinator and up to 1,000 simulated agents on this machine: joining, beats, leases, and some that vanish.

The coordinator (`control_service`) and the agents (`agents`) have a process each, so CPU and memory of the one are
apart from the other's. For each number of agents, in one life of a coordinator:

    join      all enrol with a ticket and are welcomed, 64 at a time
    beats     nothing but a heartbeat of every agent, and looks whether it is time to plan
    plan      the planner's own plan; all parts told, all clusters ready
    leases    each cluster trains at a PC's pace, n / 10 leases a second in all, and reports;
              then leases alone, as fast as they go
    loss      one agent in 20 vanishes; its clusters end, their batches are lent again, the free are planned anew
    account   no more data: every batch is settled, and granted = settled + repeated + outstanding + returned

At last the agents of the largest fleet send the same beats to a bare aiohttp server, the floor of what a beat costs.
Memory per node is (memory with n agents - memory with none) / n, before anything is planned.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.control_child import Child
from benchmarks.control_service import ACCUMULATE
from benchmarks.report import Report, arguments
from ravnest.core.config import config, require

Row = dict[str, Any]

_LEASES_PER_AGENT_S = 0.1
_LOOK_S = 0.1
_PATIENCE_S = 180.0


@config
class Lengths:
    """How long things are measured; `wait_s` is how long the coordinator waits before it plans."""

    counts: tuple[int, ...] = (100, 300, 1000)
    beat_s: float = 2.0
    beats_s: float = 10.0
    leases_s: float = 10.0
    flood_s: float = 3.0

    @property
    def wait_s(self) -> float:
        return self.beats_s + 1.5


_QUICK = Lengths(counts=(100, 300), beat_s=1.0, beats_s=3.0, leases_s=3.0, flood_s=1.0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--agents", type=int, nargs="+", metavar="N", help="how many: the fewest are compared with the most"
    )
    options = parser.parse_args()
    lengths = _QUICK if options.quick else Lengths()
    counts = sorted(options.agents or lengths.counts)
    require(counts[0] >= 20, "with fewer than 20 agents nobody vanishes")
    report = Report("control: one coordinator, many agents")
    rows = [measure(count, lengths, with_floor=count == counts[-1]) for count in counts]
    report.rows += [{name: row[name] for name in columns} for columns in _COLUMNS for row in rows]
    report.rows.append({name: rows[-1][name] for name in _FLOOR_COLUMNS})
    add_checks(report, rows, lengths)
    report.finish(options.json)


def measure(count: int, lengths: Lengths, *, with_floor: bool) -> Row:
    """One life of a coordinator with this many agents."""
    row: Row = {"agents": count}
    with tempfile.TemporaryDirectory() as folder:
        home, theirs = Path(folder) / "coordinator", Path(folder) / "agents"
        with Child("benchmarks.agents", str(theirs)) as agents:
            with Child("benchmarks.control_service", str(home)) as service:
                for phase in (join_all, beats, plan, leases, flood, loss, account):
                    phase(row, service, agents, lengths)
                    sys.stderr.write(f"{count} agents: {phase.__name__} done\n")
            if with_floor:
                floor_beats(row, home, agents, lengths)
    return row


def join_all(row: Row, service: Child, agents: Child, lengths: Lengths) -> None:
    count = row["agents"]
    ticket = service.ask("open", count=count, wait_s=lengths.wait_s, beat_s=lengths.beat_s)
    row["empty bytes"], cpu_s = service.memory_bytes(), service.ask("facts")["cpu_s"]
    joined = agents.ask("join", ticket=ticket, count=count)
    row["join s"] = joined["seconds"]
    row["join ms each"] = 1e3 * joined["seconds"] / count
    row["join cpu ms each"] = 1e3 * (service.ask("facts")["cpu_s"] - cpu_s) / count
    row["their cpu ms each"] = 1e3 * joined["cpu_s"] / count


def beats(row: Row, service: Child, agents: Child, lengths: Lengths) -> None:
    cpu_s, seconds = _cpu_over(service, lengths.beats_s)
    row["beats cpu %"] = 100 * cpu_s / seconds
    row["beat us"] = 1e6 * cpu_s / (row["agents"] * seconds / lengths.beat_s)
    row["kB per node"] = (service.memory_bytes() - row["empty bytes"]) / row["agents"] / 1e3


def plan(row: Row, service: Child, agents: Child, lengths: Lengths) -> None:
    cpu_s = service.ask("facts")["cpu_s"]
    facts = _until(service, lambda f: f["events"].get("PlanMade", 0) and f["is_at_rest"])
    row["clusters"], row["plan s"] = facts["training"], facts["plan_s"][0]
    row["form cpu ms each"] = 1e3 * (facts["cpu_s"] - cpu_s) / row["agents"]
    row["told s"] = agents.ask("facts")["told_s"] - facts["last_s"]["PlanMade"]
    row["ready s"] = facts["last_s"]["NodeReady"] - facts["last_s"]["PlanMade"]


def leases(row: Row, service: Child, agents: Child, lengths: Lengths) -> None:
    wanted = row["agents"] * _LEASES_PER_AGENT_S
    agents.ask("pace", seconds=row["clusters"] / wanted / ACCUMULATE)
    _until(service, lambda f: f["leases"]["settled"] >= row["clusters"])  # a first round, in which all march in step
    agents.ask("forget")
    cpu_s, seconds = _cpu_over(service, lengths.leases_s)
    facts = agents.ask("facts")
    row["leases cpu %"], row["leases/s"] = 100 * cpu_s / seconds, facts["leases"] / seconds
    row["lease p50 ms"], row["lease p99 ms"] = 1e3 * facts["p50_s"], 1e3 * facts["p99_s"]
    row["lease cpu ms"] = 10 * (row["leases cpu %"] - row["beats cpu %"]) / row["leases/s"]


def flood(row: Row, service: Child, agents: Child, lengths: Lengths) -> None:
    agents.ask("pace", seconds=0.0)
    agents.ask("forget")
    cpu_s, seconds = _cpu_over(service, lengths.flood_s)
    leases = agents.ask("facts")["leases"]
    row["flood cpu %"], row["most leases/s"] = 100 * cpu_s / seconds, leases / seconds
    row["flood lease cpu ms"] = 1e3 * cpu_s / leases
    agents.ask("pace", seconds=row["clusters"] / (row["agents"] * _LEASES_PER_AGENT_S) / ACCUMULATE)


def loss(row: Row, service: Child, agents: Child, lengths: Lengths) -> None:
    """Until the lost are known to be lost, nothing is left to plan and all clusters are ready."""
    before = service.ask("facts")
    row["vanished"] = row["agents"] // 20
    agents.ask("forget")
    began_s = agents.ask("kill", count=row["vanished"])
    left = row["agents"] - row["vanished"]
    facts = _until(service, lambda f: f["present"] == left and f["is_at_rest"] and f["leased_again_s"] is not None)
    row["clusters ended"] = facts["events"]["ClusterEnded"]
    row["ended s"] = facts["last_s"]["ClusterEnded"] - began_s
    row["leased again s"] = facts["leased_again_s"] - began_s
    row["lost s"] = facts["last_s"]["NodeGone"] - began_s
    row["plans"] = facts["events"]["PlanMade"] - before["events"]["PlanMade"]
    row["replan s"] = sum(facts["plan_s"][len(before["plan_s"]) :])
    row["ready again s"] = facts["last_s"]["NodeReady"] - began_s
    row["clusters after"] = facts["training"]
    row["p99 ms meanwhile"] = 1e3 * agents.ask("facts")["p99_s"]


def account(row: Row, service: Child, agents: Child, lengths: Lengths) -> None:
    agents.ask("pace", seconds=0.0)
    service.ask("end_data")
    facts = _until(service, lambda f: not f["unsettled"])
    found = facts["leases"]
    row["granted"], row["settled"], row["returned"] = (found[name] for name in ("granted", "settled", "returned"))
    row["repeated"], row["outstanding"] = found.get("repeated", 0), found.get("outstanding", 0)
    row["is exact"] = int(found["is_balanced"] and row["settled"] == facts["settled"] == facts["next_new"])
    trouble = agents.ask("facts")["trouble"]  # before the coordinator closes, which some hear in the middle of a word
    row["troubles"] = sum(trouble.values())
    sys.stderr.writelines(f"{number} times: {what}\n" for what, number in trouble.items())
    service.ask("close")


def floor_beats(row: Row, home: Path, agents: Child, lengths: Lengths) -> None:
    """The same beats of the same agents, those that are left, to a server that does nothing with them."""
    with Child("benchmarks.control_floor", str(home)) as floor:
        port = floor.ask("open", beat_s=lengths.beat_s)
        empty_bytes, count = floor.memory_bytes(), row["agents"] - row["vanished"]
        agents.ask("visit", port=port)
        before = floor.ask("facts")
        cpu_s, _ = _cpu_over(floor, lengths.beats_s)
        row["floor beat us"] = 1e6 * cpu_s / (floor.ask("facts")["heard"] - before["heard"])
        row["floor kB per node"] = (floor.memory_bytes() - empty_bytes) / count / 1e3


def _cpu_over(child: Child, seconds: float) -> tuple[float, float]:
    """CPU seconds that a process uses over about this time, and the time it really was."""
    before, began = child.ask("facts")["cpu_s"], time.monotonic()
    time.sleep(seconds)
    return child.ask("facts")["cpu_s"] - before, time.monotonic() - began


def _until(service: Child, is_so: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        facts: dict[str, Any] = service.ask("facts")
        if is_so(facts):
            return facts
        time.sleep(_LOOK_S)
    raise RuntimeError(f"after {_PATIENCE_S:g} s the coordinator stands at {facts}")


_COLUMNS = (
    ("agents", "join s", "join ms each", "join cpu ms each", "their cpu ms each", "beats cpu %", "beat us",
     "kB per node"),
    ("agents", "clusters", "plan s", "told s", "ready s", "form cpu ms each"),
    ("agents", "leases/s", "lease p50 ms", "lease p99 ms", "leases cpu %", "lease cpu ms", "most leases/s",
     "flood cpu %", "flood lease cpu ms"),
    ("agents", "vanished", "clusters ended", "ended s", "leased again s", "lost s", "plans", "replan s",
     "ready again s", "clusters after", "p99 ms meanwhile"),
    ("agents", "granted", "settled", "repeated", "outstanding", "returned", "is exact", "troubles"),
)  # fmt: skip
_FLOOR_COLUMNS = ("agents", "beat us", "floor beat us", "kB per node", "floor kB per node")


def add_checks(report: Report, rows: list[Row], lengths: Lengths) -> None:
    """The largest fleet by itself, and against the smallest."""
    few, many = rows[0], rows[-1]
    count = many["agents"]
    growth = f"{count} against {few['agents']} agents"
    report.check(f"lease p99, ms, at {many['leases/s']:.0f} leases/s of {count} agents", many["lease p99 ms"], "<= 50")
    report.check("memory per node, kB", many["kB per node"], "<= 200")
    report.check(f"memory per node, {growth}", many["kB per node"] / few["kB per node"], "<= 1.2")
    report.check(f"CPU of a beat, {growth}", many["beat us"] / few["beat us"], "<= 1.3")
    report.check("CPU of a beat, against a bare aiohttp server", many["beat us"] / many["floor beat us"], "<= 4.0")
    report.check("beats of 1,000 agents every 2 s, % of a core", many["beat us"] * 1000 / 2 / 1e4, "< 20")
    report.check(f"seconds to join, each, {growth}", many["join ms each"] / few["join ms each"], "<= 1.5")
    report.check(f"CPU of a lease, {growth}", many["lease cpu ms"] / few["lease cpu ms"], "<= 1.3")
    for row in rows:
        report.check(f"{row['agents']} agents: leases are accounted exactly, all settled", row["is exact"], "== 1")
        report.check(f"{row['agents']} agents: conversations or parts that failed", row["troubles"], "== 0")
        report.check(f"{row['agents']} agents: clusters ready after the loss", row["clusters after"], "> 0")
    report.check("loss: s until the clusters ended", many["ended s"], "<= 1")
    report.check("loss: s until their batches were lent again", many["leased again s"], "<= 5")
    beside_s = many["ready again s"] - many["replan s"]
    report.check("loss: s until all were ready again, beside the planner's own", beside_s, "<= 5")
    report.check("loss: lease p99 meanwhile, ms", many["p99 ms meanwhile"], "<= 200")


if __name__ == "__main__":
    main()
