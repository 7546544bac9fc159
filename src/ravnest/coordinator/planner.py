"""Has plans made, one at a time and in a thread, because they take long; and looks for reasons to make others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from ..core.control import NodeProfile
from ..core.errors import RavnestError
from ..core.metrics import StageMetrics
from .copies import Copies
from .decide import MakePlan, Reconsider, Wishes, decide, machines_of
from .events import Cluster, Considered, Event, FleetPaced, NodeSlowed, PlanFailed, PlanMade
from .requester import Requester, StageFiles
from .running import Made, Running
from .slow import FLEET, Watch
from .sources import Beginning, find_beginning
from .state import State

__all__ = ["Planner"]

_STATE_FACTOR = 8  # sets of weights in a copy, twice what there usually are
_MOST_BYTES = 1 << 34
_GATHER_S = 0.25  # a mishap that frees some nodes often frees more: all of them are planned together


class _Office(Protocol):
    """What of the coordinator is needed here."""

    state: State
    wishes: Wishes
    requester: Requester
    running: Running
    copies: Copies

    def now_s(self) -> float: ...

    def record(self, event: Event) -> None: ...

    def note(self, text: str) -> None: ...


def _moving_s(beginning: Beginning, profiles: Sequence[NodeProfile], files: Sequence[StageFiles]) -> float:
    """How long the longest of these copies could take, generously: a plan is not given up because lines are slow."""
    longest_s = 0.0
    for found, profile, given in zip(beginning.stages, profiles, files, strict=True):
        for one in found:
            rate = min(one.up_bytes_per_s, profile.down_bytes_per_s)
            longest_s = max(longest_s, _STATE_FACTOR * min(given.max_bytes, _MOST_BYTES) / rate)
    return longest_s


class Planner:
    """Lives in the coordinator's loop."""

    def __init__(self, office: _Office) -> None:
        self._office = office
        self._task: asyncio.Task[None] | None = None
        self._watch = Watch()

    def carry_out(self, decision: MakePlan | Reconsider) -> None:
        """Begin, unless a plan is being made."""
        running = self._office.running
        if isinstance(decision, Reconsider):
            if not running.is_ending:
                self._begin(self._reconsider(decision))
        elif not running.is_ending or not running.clusters:  # whose weights would else be lost
            self._begin(self._plan_soon())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(work)
        else:
            work.close()

    async def _plan_soon(self) -> None:
        await asyncio.sleep(_GATHER_S)
        for decision in decide(self._office.state, self._office.now_s(), self._office.wishes):
            if isinstance(decision, MakePlan):
                await self._plan(decision.nodes)

    async def _plan(self, nodes: Sequence[str]) -> None:
        office, state = self._office, self._office.state
        began_s, generation = office.now_s(), state.generation + 1
        try:
            machines = machines_of(state, nodes)
            planned = await asyncio.to_thread(office.requester.plan, machines, generation, tuple(state.broken))
            taken = {machine.name: machine.speed for machine in machines}
            made = [await self._make(self._as_measured(cluster, taken)) for cluster in planned.clusters]
        except RavnestError as error:
            office.record(PlanFailed(office.now_s(), str(error), tuple(nodes)))
            return
        free = set(state.free_nodes(office.now_s(), office.wishes.blame_s))
        kept = [one for one in made if free.issuperset(one.cluster.members)]
        if len(kept) < len(made):
            office.note("a PC left while the plan was made: its cluster is planned anew")
        clusters, now_s = tuple(one.cluster for one in kept), office.now_s()
        reason = planned.reason
        office.record(PlanMade(now_s, generation, clusters, planned.spares, planned.left_out, reason, now_s - began_s))
        for one in kept:
            office.running.found(one, office.copies.sources(one.cluster.members, one.beginning))

    def _as_measured(self, cluster: Cluster, taken: Mapping[str, float]) -> Cluster:
        """With the seconds that its stages would take at the speeds that its members measured."""
        nodes = self._office.state.nodes
        shares = [taken[name] / nodes[name].profile.gflops for name in cluster.members]
        seconds = tuple(s * share for s, share in zip(cluster.seconds, shares, strict=False))  # () if nobody knows
        return msgspec.structs.replace(cluster, seconds=seconds)

    async def _make(self, cluster: Cluster) -> Made:
        """Its files, and what it goes on from."""
        office = self._office
        beginning = self._beginning(cluster)
        profiles = [office.state.nodes[name].profile for name in cluster.members]
        files = await asyncio.to_thread(office.requester.stages, cluster, profiles, beginning.lacking)
        if beginning.updates:
            cluster = msgspec.structs.replace(
                cluster, begin=beginning.updates, begins=beginning.words, moving_s=_moving_s(beginning, profiles, files)
            )
        return Made(cluster, files, beginning)

    def _beginning(self, cluster: Cluster) -> Beginning:
        office = self._office
        found = find_beginning(office.state, cluster.members, cluster.cuts, office.now_s(), office.running.updates)
        learnt = office.requester.learnt() if found.lacking else 0
        return replace(found, updates=max(found.updates, learnt))

    async def _reconsider(self, decision: Reconsider) -> None:
        """If another plan is worth enough more, what it changes ends, when it has trained what it has."""
        office, state = self._office, self._office.state
        members = [name for c in decision.clusters for name in state.clusters[c].plan.members]
        machines = machines_of(state, (*members, *decision.nodes))
        try:
            ends, reason = await asyncio.to_thread(office.requester.better, machines, decision.clusters)
        except RavnestError as error:
            ends, reason = (), str(error)
        office.record(Considered(office.now_s(), decision.nodes, ends, f"{decision.reason}: {reason}"))
        for cluster in ends:
            office.running.retire(cluster, f"a better plan: {reason}")

    # nodes that are faster or slower than they were taken to be

    def heard(self, name: str, cluster: Cluster, stage: int, metrics: StageMetrics) -> None:
        """What a stage has done so far."""
        if cluster.seconds:
            self._watch.heard(name, metrics, cluster.seconds[stage], self._office.now_s())

    def look(self) -> None:
        """Whether a node shows another speed than it was planned with; raises what went wrong with a plan."""
        if self._task is not None and self._task.done():
            self._task.result()
        office, now_s = self._office, self._office.now_s()
        known = {name: office.state.nodes[name].speed for name in office.running.members}
        for found in self._watch.look({FLEET: office.state.pace} | known, now_s):
            if found.name == FLEET:
                office.record(FleetPaced(now_s, found.speed, "their stages show it"))
            else:
                office.record(NodeSlowed(now_s, found.name, found.speed, "its stage shows it, next to the others"))
