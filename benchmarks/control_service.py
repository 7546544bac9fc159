"""The coordinator of `benchmarks.control`: a real service in a process of its own, with a requester that costs nothing.

Plans are the planner's own, of a GPT with 24 layers; batches are a few kilobytes of zeros, as many as are wanted.
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

from benchmarks.control_child import answer
from benchmarks.fleets import FLOPS_PER_S, gpt_chain
from ravnest.coordinator.decide import Wishes, decide
from ravnest.coordinator.events import Cluster, Event, Idle, LeaseGranted, LeaseReturned
from ravnest.coordinator.planning import form_apart
from ravnest.coordinator.requester import Piece, Planned, RingShape, StageFiles
from ravnest.coordinator.service import Service, ServiceConfig
from ravnest.core.control import NodeProfile
from ravnest.core.orders import Reports
from ravnest.net.front import FrontConfig
from ravnest.plan import Fleet, Task
from ravnest.plan.fleet import Machine

ACCUMULATE = 4
PIECE_BYTES = 2048
_STAGE_BYTES = 20_000  # a stage file of a few layers
_WITHOUT_END = 1 << 40


class Zeros:
    """A `Requester` that plans in earnest and gives zeros to train on."""

    def __init__(self) -> None:
        self.plan_s: list[float] = []
        self.available_batches = _WITHOUT_END
        self.settled_batches = 0
        self._chain = gpt_chain()
        self._piece = Piece(1, 1 / ACCUMULATE, (bytes(PIECE_BYTES),))

    def plan(self, machines: Sequence[Machine], generation: int, broken: Sequence[str] = ()) -> Planned:
        began = time.perf_counter()
        speeds = tuple(replace(m, speed=m.speed * 1e9 / FLOPS_PER_S) for m in machines)
        found = form_apart(Task(chain=self._chain, fleet=Fleet(machines=speeds), accumulate=ACCUMULATE))
        self.plan_s.append(time.perf_counter() - began)
        clusters = tuple(
            Cluster(
                id=f"c{generation}-{i}", generation=generation, members=plan.members, cuts=tuple(plan.partition.cuts),
                accumulate=ACCUMULATE, depths=tuple(plan.partition.depths), samples_per_s=plan.samples_per_s,
                reason=plan.reason,
            )
            for i, plan in enumerate(found.clusters)
        )  # fmt: skip
        idle = [tuple(Idle(one.name, one.reason) for one in group) for group in (found.spares, found.left_out)]
        return Planned(clusters, idle[0], idle[1], found.reason)

    def better(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        return (), "nothing is better"

    def stages(
        self, cluster: Cluster, profiles: Sequence[NodeProfile], lacking: Sequence[int] = ()
    ) -> list[StageFiles]:
        brief = msgspec.json.encode({"accumulate": cluster.accumulate})
        return [StageFiles(bytes([i]) * _STAGE_BYTES, brief) for i in range(len(profiles))]

    def rings(self, clusters: Sequence[Cluster]) -> list[RingShape]:
        return []

    def available(self) -> int:
        return self.available_batches

    def pieces(self, batch: int, count: int) -> list[Piece]:
        return [self._piece] * count

    def fed(self, cluster: str, window: int, batch: int, pieces: Sequence[Piece]) -> None: ...

    def settled(self, batch: int) -> None:
        self.settled_batches += 1

    def reported(self, cluster: str, stage: int, report: Reports) -> None: ...

    def ended(self, cluster: str, reason: str, *, is_lost: bool) -> None: ...

    def learnt(self) -> int:
        return 0

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        return None

    def weights_path(self, cluster: str, stage: int) -> Path:
        raise AssertionError("no weights come back in this benchmark")


class Coordinating:
    """Opens the service and says what it has seen."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._zeros = Zeros()
        self._counts: Counter[str] = Counter()
        self._last_s: dict[str, float] = {}
        self._came_back: set[int] = set()
        self._leased_again_s = 0.0

    async def open(self, *, count: int, wait_s: float, beat_s: float) -> str:
        """Listen, and plan once this many nodes are there and `wait_s` have passed; answers with a ticket."""
        many = 8 * count + 1024  # all of them come from one address, several times
        config = ServiceConfig(
            directory=self._directory, host="127.0.0.1", port=0,
            wishes=Wishes(min_nodes=count, wait_s=wait_s, beat_s=beat_s),
            front=FrontConfig(max_connections=many, max_per_address=many, max_handshakes=many),
        )  # fmt: skip
        self._service = Service(config, self._zeros, run="benchmark", on_event=self._happened)
        await self._service.open()
        return self._service.ticket()

    async def facts(self) -> dict[str, Any]:
        """Where things stand, the CPU seconds used so far, and when each kind of event happened last."""
        coordinator = self._service.coordinator
        state = coordinator.state
        counts = state.leases.counts
        phases = Counter(cluster.phase for cluster in state.live_clusters())
        return {
            "cpu_s": time.process_time(),
            "present": sum(node.is_present for node in state.nodes.values()),
            "training": phases["training"],
            "forming": phases["forming"],
            "is_at_rest": not phases["forming"] and not decide(state, coordinator.now_s(), coordinator.wishes),
            "plan_s": self._zeros.plan_s,
            "leases": msgspec.structs.asdict(counts) | {"is_balanced": counts.is_balanced},
            "next_new": state.leases.next_new,
            "unsettled": len(state.leases.unsettled),
            "settled": self._zeros.settled_batches,
            "events": dict(self._counts),
            "last_s": self._last_s,
            "leased_again_s": self._leased_again_s if not self._came_back else None,
        }

    async def end_data(self) -> None:
        """No more new batches."""
        self._zeros.available_batches = self._service.coordinator.state.leases.next_new

    async def close(self) -> None:
        await self._service.close("the benchmark is over")

    def _happened(self, event: Event) -> None:
        kind = type(event).__name__
        self._counts[kind] += 1
        self._last_s[kind] = time.monotonic()
        if isinstance(event, LeaseReturned):
            self._came_back.add(event.batch)
        elif isinstance(event, LeaseGranted) and event.batch in self._came_back:
            self._came_back.remove(event.batch)
            self._leased_again_s = time.monotonic()


async def main() -> None:
    part = Coordinating(Path(sys.argv[1]))
    await answer({"open": part.open, "facts": part.facts, "end_data": part.end_data, "close": part.close})


if __name__ == "__main__":
    asyncio.run(main())
