"""The coordinator of `benchmarks.control`: a real server in a process of its own, with a synthetic requester.

Plans are the planner's own, of a GPT with 24 layers; batches are a few kilobytes of zeros, without end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.control.child import serve
from benchmarks.planner.fleets import FLOPS_PER_S, gpt_chain
from ravnest.coordinator.events import ClusterSpec, Event, IdleNode, LeaseGranted, LeaseReturned
from ravnest.coordinator.http.alpn_server import AlpnServerConfig
from ravnest.coordinator.planning import plan_in_subprocess
from ravnest.coordinator.policy.membership import MembershipPolicy, decide
from ravnest.coordinator.requester import Microbatch, PlannedClusters, RingShape, StageFiles
from ravnest.coordinator.service import CoordinatorConfig, CoordinatorServer
from ravnest.planner import Fleet, Task
from ravnest.planner.fleet import Machine
from ravnest.protocol.commands import Report
from ravnest.protocol.control import NodeProfile

ACCUMULATE = 4
MICROBATCH_BYTES = 2048
_STAGE_BYTES = 20_000  # a stage file of a few layers
_ENDLESS = 1 << 40


class SyntheticRequester:
    """A `Requester` that plans with the real planner and supplies zeros as data."""

    def __init__(self) -> None:
        self.plan_s: list[float] = []
        self.available_batches = _ENDLESS
        self.settled_batches = 0
        self._chain = gpt_chain()
        self._microbatch = Microbatch(1, 1 / ACCUMULATE, (bytes(MICROBATCH_BYTES),))

    def plan(
        self, machines: Sequence[Machine], generation: int, failed_clusters: Sequence[str] = ()
    ) -> PlannedClusters:
        began = time.perf_counter()
        speeds = tuple(replace(m, speed=m.speed * 1e9 / FLOPS_PER_S) for m in machines)
        fleet_plan = plan_in_subprocess(Task(chain=self._chain, fleet=Fleet(machines=speeds), accumulate=ACCUMULATE))
        self.plan_s.append(time.perf_counter() - began)
        clusters = tuple(
            ClusterSpec(
                id=f"c{generation}-{i}", generation=generation, members=plan.members, cuts=tuple(plan.partition.cuts),
                accumulate=ACCUMULATE, depths=tuple(plan.partition.depths), samples_per_s=plan.samples_per_s,
                reason=plan.reason,
            )
            for i, plan in enumerate(fleet_plan.clusters)
        )  # fmt: skip
        idle = [
            tuple(IdleNode(one.name, one.reason) for one in group) for group in (fleet_plan.spares, fleet_plan.left_out)
        ]
        return PlannedClusters(clusters, idle[0], idle[1], fleet_plan.reason)

    def find_better_plan(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        return (), "nothing is better"

    def stages(
        self,
        cluster: ClusterSpec,
        profiles: Sequence[NodeProfile],
        missing_stages: Sequence[int] = (),
        missing_frozen: Sequence[int] = (),
    ) -> list[StageFiles]:
        config = msgspec.json.encode({"accumulate": cluster.accumulate})
        return [StageFiles(bytes([i]) * _STAGE_BYTES, config) for i in range(len(profiles))]

    def rings(self, clusters: Sequence[ClusterSpec]) -> list[RingShape]:
        return []

    def available(self) -> int:
        return self.available_batches

    def microbatches(self, batch: int, count: int) -> list[Microbatch]:
        return [self._microbatch] * count

    def prompt(self, tokens: Sequence[int]) -> tuple[Microbatch, int]:
        return self._microbatch, len(tokens) - 1

    def batch_started(self, cluster: str, step: int, batch: int, microbatches: Sequence[Microbatch]) -> None: ...

    def batch_settled(self, batch: int) -> None:
        self.settled_batches += 1

    def stage_reported(self, cluster: str, stage: int, report: Report) -> None: ...

    def cluster_ended(self, cluster: str, reason: str, *, is_lost: bool) -> None: ...

    def checkpoint_updates(self) -> int:
        return 0

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        return None

    def weights_path(self, cluster: str, stage: int) -> Path:
        raise AssertionError("no weights come back in this benchmark")


class MeasuredCoordinator:
    """Opens the coordinator and reports its state and events."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._requester = SyntheticRequester()
        self._counts: Counter[str] = Counter()
        self._last_s: dict[str, float] = {}
        self._returned: set[int] = set()
        self._leased_again_s = 0.0

    async def open(self, *, count: int, wait_s: float, heartbeat_s: float) -> str:
        """Listen, and plan once `count` nodes have joined and `wait_s` have passed; returns a ticket."""
        many = 8 * count + 1024  # all agents connect from one address, several times
        config = CoordinatorConfig(
            directory=self._directory, host="127.0.0.1", port=0,
            membership=MembershipPolicy(min_nodes=count, settle_s=wait_s, heartbeat_s=heartbeat_s),
            alpn=AlpnServerConfig(max_connections=many, max_per_address=many, max_handshakes=many),
        )  # fmt: skip
        self._service = CoordinatorServer(
            config, self._requester, run="benchmark", on_event=self._record, **self._server_options()
        )
        await self._service.open()
        return self._service.ticket()

    def _server_options(self) -> dict[str, Any]:
        """Further arguments of the server, for other benchmarks."""
        return {}

    async def facts(self) -> dict[str, Any]:
        """The state, the CPU seconds used, and the time of the last event of each kind."""
        coordinator = self._service.coordinator
        state = coordinator.state
        counts = state.leases.counts
        phases = Counter(cluster.phase for cluster in state.live_clusters())
        return {
            "cpu_s": time.process_time(),
            "present": sum(node.is_present for node in state.nodes.values()),
            "training": phases["training"],
            "forming": phases["forming"],
            "is_settled": not phases["forming"] and not decide(state, coordinator.now_s(), coordinator.policy),
            "plan_s": self._requester.plan_s,
            "leases": msgspec.structs.asdict(counts) | {"is_balanced": counts.is_balanced},
            "next_new": state.leases.next_new,
            "unsettled": len(state.leases.unsettled),
            "settled": self._requester.settled_batches,
            "events": dict(self._counts),
            "last_s": self._last_s,
            "leased_again_s": self._leased_again_s if not self._returned else None,
        }

    async def end_data(self) -> None:
        """Supply no more new batches."""
        self._requester.available_batches = self._service.coordinator.state.leases.next_new

    async def close(self) -> None:
        await self._service.close("the benchmark is over")

    def _record(self, event: Event) -> None:
        kind = type(event).__name__
        self._counts[kind] += 1
        self._last_s[kind] = time.monotonic()
        if isinstance(event, LeaseReturned):
            self._returned.add(event.batch)
        elif isinstance(event, LeaseGranted) and event.batch in self._returned:
            self._returned.remove(event.batch)
            self._leased_again_s = time.monotonic()


async def main() -> None:
    coordinator = MeasuredCoordinator(Path(sys.argv[1]))
    await serve({
        "open": coordinator.open, "facts": coordinator.facts, "end_data": coordinator.end_data,
        "close": coordinator.close,
    })  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())
