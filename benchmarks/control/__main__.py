"""Measures one real coordinator with up to 1,000 simulated agents: joining, heartbeats, leases, lost agents.

The coordinator (`benchmarks.control.service`) and the agents (`benchmarks.control.agents`) have a process each, so that
their CPU and memory are measured separately. For each number of agents, with one coordinator:

    join        all agents enrol with a ticket and connect, 64 at a time
    heartbeats  only a heartbeat of every agent, and the coordinator's own polling
    plan        the planner's own plan; all assignments sent, all clusters ready
    leases      each cluster trains at the rate of a PC, n / 10 leases a second in all, and reports;
                then leases alone, without a limit
    loss        one agent in 20 disconnects; its clusters end, their batches are leased again, free nodes are replanned
    account     no more data: every batch is settled, and granted = settled + repeated + outstanding + returned

Finally the agents of the largest fleet send the same heartbeats to a bare aiohttp server, the baseline of their cost.
Memory per node is (memory with n agents - memory with none) / n, before anything is planned.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.control.child import Child
from benchmarks.control.service import ACCUMULATE
from benchmarks.report import Report, arguments
from ravnest.coordinator.events import ClusterEnded, NodeLost, NodeReady, PlanCreated
from ravnest.core.config import config, require

Row = dict[str, Any]

_LEASES_PER_AGENT_S = 0.1
_POLL_S = 0.1
_TIMEOUT_S = 180.0


@config
class Durations:
    """Seconds of each phase; `wait_s` is the time that the coordinator waits before it plans."""

    counts: tuple[int, ...] = (100, 300, 1000)
    heartbeat_s: float = 2.0
    heartbeats_s: float = 10.0
    leases_s: float = 10.0
    flood_s: float = 3.0

    @property
    def wait_s(self) -> float:
        return self.heartbeats_s + 1.5


_QUICK = Durations(counts=(100, 300), heartbeat_s=1.0, heartbeats_s=3.0, leases_s=3.0, flood_s=1.0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--agents",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of agents; the smallest is compared with the largest",
    )
    options = parser.parse_args()
    durations = _QUICK if options.quick else Durations()
    counts = sorted(options.agents or durations.counts)
    require(counts[0] >= 20, f"--agents must be at least 20, got {counts[0]}: one agent in 20 is disconnected")
    report = Report("control: one coordinator, many agents")
    rows = [measure(count, durations, with_floor=count == counts[-1]) for count in counts]
    report.rows += [{name: row[name] for name in columns} for columns in _COLUMNS for row in rows]
    report.rows.append({name: rows[-1][name] for name in _BARE_COLUMNS})
    add_checks(report, rows, durations)
    report.finish(options.json)


def measure(count: int, durations: Durations, *, with_floor: bool) -> Row:
    """Run all phases with one coordinator and this many agents."""
    row: Row = {"agents": count}
    with tempfile.TemporaryDirectory() as folder:
        coordinator_folder, agents_folder = Path(folder) / "coordinator", Path(folder) / "agents"
        with Child("benchmarks.control.agents", str(agents_folder)) as agents:
            with Child("benchmarks.control.service", str(coordinator_folder)) as service:
                for phase in (join_all, heartbeats, plan, leases, flood, loss, account):
                    phase(row, service, agents, durations)
                    sys.stderr.write(f"{count} agents: {phase.__name__} done\n")
            if with_floor:
                bare_heartbeats(row, coordinator_folder, agents, durations)
    return row


def join_all(row: Row, service: Child, agents: Child, durations: Durations) -> None:
    count = row["agents"]
    ticket = service.request("open", count=count, wait_s=durations.wait_s, heartbeat_s=durations.heartbeat_s)
    row["empty bytes"], cpu_s = service.memory_bytes(), service.request("facts")["cpu_s"]
    joined = agents.request("join", ticket=ticket, count=count)
    row["join s"] = joined["seconds"]
    row["join ms each"] = 1e3 * joined["seconds"] / count
    row["join cpu ms each"] = 1e3 * (service.request("facts")["cpu_s"] - cpu_s) / count
    row["their cpu ms each"] = 1e3 * joined["cpu_s"] / count


def heartbeats(row: Row, service: Child, agents: Child, durations: Durations) -> None:
    cpu_s, seconds = cpu_over(service, durations.heartbeats_s)
    row["heartbeats cpu %"] = 100 * cpu_s / seconds
    row["heartbeat us"] = 1e6 * cpu_s / (row["agents"] * seconds / durations.heartbeat_s)
    row["kB per node"] = (service.memory_bytes() - row["empty bytes"]) / row["agents"] / 1e3


def plan(row: Row, service: Child, agents: Child, durations: Durations) -> None:
    cpu_s = service.request("facts")["cpu_s"]
    facts = wait_until(service, lambda f: f["events"].get(PlanCreated.__name__, 0) and f["is_settled"])
    row["clusters"], row["plan s"] = facts["training"], facts["plan_s"][0]
    row["form cpu ms each"] = 1e3 * (facts["cpu_s"] - cpu_s) / row["agents"]
    row["assigned s"] = agents.request("facts")["assigned_s"] - facts["last_s"][PlanCreated.__name__]
    row["ready s"] = facts["last_s"][NodeReady.__name__] - facts["last_s"][PlanCreated.__name__]


def leases(row: Row, service: Child, agents: Child, durations: Durations) -> None:
    wanted = row["agents"] * _LEASES_PER_AGENT_S
    agents.request("set_rate", microbatch_s=row["clusters"] / wanted / ACCUMULATE)
    wait_until(service, lambda f: f["leases"]["settled"] >= row["clusters"])  # a first round, in which all are in phase
    agents.request("reset")
    cpu_s, seconds = cpu_over(service, durations.leases_s)
    facts = agents.request("facts")
    row["leases cpu %"], row["leases/s"] = 100 * cpu_s / seconds, facts["leases"] / seconds
    row["lease p50 ms"], row["lease p99 ms"] = 1e3 * facts["p50_s"], 1e3 * facts["p99_s"]
    row["lease cpu ms"] = 10 * (row["leases cpu %"] - row["heartbeats cpu %"]) / row["leases/s"]


def flood(row: Row, service: Child, agents: Child, durations: Durations) -> None:
    agents.request("set_rate", microbatch_s=0.0)
    agents.request("reset")
    cpu_s, seconds = cpu_over(service, durations.flood_s)
    leases = agents.request("facts")["leases"]
    row["flood cpu %"], row["most leases/s"] = 100 * cpu_s / seconds, leases / seconds
    row["flood lease cpu ms"] = 1e3 * cpu_s / leases
    agents.request("set_rate", microbatch_s=row["clusters"] / (row["agents"] * _LEASES_PER_AGENT_S) / ACCUMULATE)


def loss(row: Row, service: Child, agents: Child, durations: Durations) -> None:
    """Wait until all disconnected agents are lost, nothing is left to plan and all clusters are ready."""
    before = service.request("facts")
    row["disconnected"] = row["agents"] // 20
    agents.request("reset")
    began_s = agents.request("kill", count=row["disconnected"])
    left = row["agents"] - row["disconnected"]
    facts = wait_until(service, lambda f: f["present"] == left and f["is_settled"] and f["leased_again_s"] is not None)
    row["clusters ended"] = facts["events"][ClusterEnded.__name__]
    row["ended s"] = facts["last_s"][ClusterEnded.__name__] - began_s
    row["leased again s"] = facts["leased_again_s"] - began_s
    row["lost s"] = facts["last_s"][NodeLost.__name__] - began_s
    row["plans"] = facts["events"][PlanCreated.__name__] - before["events"][PlanCreated.__name__]
    row["replan s"] = sum(facts["plan_s"][len(before["plan_s"]) :])
    row["ready again s"] = facts["last_s"][NodeReady.__name__] - began_s
    row["clusters after"] = facts["training"]
    row["p99 ms during loss"] = 1e3 * agents.request("facts")["p99_s"]


def account(row: Row, service: Child, agents: Child, durations: Durations) -> None:
    agents.request("set_rate", microbatch_s=0.0)
    service.request("end_data")
    facts = wait_until(service, lambda f: not f["unsettled"])
    counts = facts["leases"]
    row["granted"], row["settled"], row["returned"] = (counts[name] for name in ("granted", "settled", "returned"))
    row["repeated"], row["outstanding"] = counts.get("repeated", 0), counts.get("outstanding", 0)
    row["is exact"] = int(counts["is_balanced"] and row["settled"] == facts["settled"] == facts["next_new"])
    failures = agents.request("facts")["failures"]  # before the coordinator closes, which interrupts some messages
    row["failures"] = sum(failures.values())
    sys.stderr.writelines(f"{number} times: {failure}\n" for failure, number in failures.items())
    service.request("close")


def bare_heartbeats(row: Row, folder: Path, agents: Child, durations: Durations) -> None:
    """Send the same heartbeats of the remaining agents to a server that ignores them."""
    with Child("benchmarks.control.bare_server", str(folder)) as server:
        port = server.request("open", heartbeat_s=durations.heartbeat_s)
        empty_bytes, count = server.memory_bytes(), row["agents"] - row["disconnected"]
        agents.request("reconnect", port=port)
        before = server.request("facts")
        cpu_s, _ = cpu_over(server, durations.heartbeats_s)
        row["bare server heartbeat us"] = 1e6 * cpu_s / (server.request("facts")["received"] - before["received"])
        row["bare server kB per node"] = (server.memory_bytes() - empty_bytes) / count / 1e3


def cpu_over(child: Child, seconds: float) -> tuple[float, float]:
    """CPU seconds that a process uses during about `seconds`, and the exact duration."""
    before, began = child.request("facts")["cpu_s"], time.monotonic()
    time.sleep(seconds)
    return child.request("facts")["cpu_s"] - before, time.monotonic() - began


def wait_until(service: Child, predicate: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    end_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < end_s:
        facts: dict[str, Any] = service.request("facts")
        if predicate(facts):
            return facts
        time.sleep(_POLL_S)
    raise RuntimeError(f"not reached within {_TIMEOUT_S:g} s; the coordinator's state is {facts}")


_COLUMNS = (
    ("agents", "join s", "join ms each", "join cpu ms each", "their cpu ms each", "heartbeats cpu %", "heartbeat us",
     "kB per node"),
    ("agents", "clusters", "plan s", "assigned s", "ready s", "form cpu ms each"),
    ("agents", "leases/s", "lease p50 ms", "lease p99 ms", "leases cpu %", "lease cpu ms", "most leases/s",
     "flood cpu %", "flood lease cpu ms"),
    ("agents", "disconnected", "clusters ended", "ended s", "leased again s", "lost s", "plans", "replan s",
     "ready again s", "clusters after", "p99 ms during loss"),
    ("agents", "granted", "settled", "repeated", "outstanding", "returned", "is exact", "failures"),
)  # fmt: skip
_BARE_COLUMNS = ("agents", "heartbeat us", "bare server heartbeat us", "kB per node", "bare server kB per node")


def add_checks(report: Report, rows: list[Row], durations: Durations) -> None:
    """Check the largest fleet, alone and against the smallest."""
    few, many = rows[0], rows[-1]
    count = many["agents"]
    growth = f"{count} against {few['agents']} agents"
    report.check(f"lease p99, ms, at {many['leases/s']:.0f} leases/s of {count} agents", many["lease p99 ms"], "<= 50")
    report.check("memory per node, kB", many["kB per node"], "<= 200")
    report.check(f"memory per node, {growth}", many["kB per node"] / few["kB per node"], "<= 1.2")
    report.check(f"CPU of a heartbeat, {growth}", many["heartbeat us"] / few["heartbeat us"], "<= 1.3")
    report.check(
        "CPU of a heartbeat, against a bare aiohttp server",
        many["heartbeat us"] / many["bare server heartbeat us"],
        "<= 4.0",
    )
    report.check("heartbeats of 1,000 agents every 2 s, % of a core", many["heartbeat us"] * 1000 / 2 / 1e4, "< 20")
    report.check(f"seconds to join, each, {growth}", many["join ms each"] / few["join ms each"], "<= 1.5")
    report.check(f"CPU of a lease, {growth}", many["lease cpu ms"] / few["lease cpu ms"], "<= 1.3")
    for row in rows:
        report.check(f"{row['agents']} agents: leases are accounted exactly, all settled", row["is exact"], "== 1")
        report.check(f"{row['agents']} agents: sessions or assignments that failed", row["failures"], "== 0")
        report.check(f"{row['agents']} agents: clusters ready after the loss", row["clusters after"], "> 0")
    report.check("loss: s until the clusters ended", many["ended s"], "<= 1")
    report.check("loss: s until their batches were leased again", many["leased again s"], "<= 5")
    without_planning_s = many["ready again s"] - many["replan s"]
    report.check("loss: s until all were ready again, without planning", without_planning_s, "<= 5")
    report.check("loss: lease p99 during the loss, ms", many["p99 ms during loss"], "<= 200")


if __name__ == "__main__":
    main()
