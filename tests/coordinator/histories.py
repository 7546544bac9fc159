"""Random histories that could have happened: a list of small numbers is read as events, each legal where it stands.

Numbers, so that hypothesis can make a failing history short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.events import Cluster, Event, Idle
from ravnest.coordinator.state import State, apply
from ravnest.core.control import NodeProfile, Whereabouts

PROFILE = NodeProfile(memory_bytes=8_000_000_000, gflops=40.0)
NAMES = ("attic", "barn", "cellar", "den", "eaves", "foyer")

_moves = st.tuples(st.integers(0, 20), st.integers(0, 11))
numbers = st.lists(_moves, max_size=12) | st.lists(_moves, min_size=30, max_size=90)


def connected(at_s: float, name: str, *, holding: int = 0, gflops: float = 40.0, host: str = "") -> on.NodeConnected:
    profile = NodeProfile(memory_bytes=8_000_000_000, gflops=gflops)
    where = Whereabouts((), (host, 4000)) if host else Whereabouts()
    return on.NodeConnected(at_s, name, profile, where, f"{host or '203.0.113.1'}:4000", holding)


def cluster(number: int, *members: str, generation: int = 1) -> Cluster:
    return Cluster(
        id=f"c{number}", generation=generation, members=members, cuts=tuple(range(1, len(members))), accumulate=4,
        depths=tuple(range(len(members), 0, -1)), samples_per_s=10.0, reason="it fits",
    )  # fmt: skip


def planned(at_s: float, *clusters: Cluster, idle: Sequence[str] = (), generation: int = 1) -> on.PlanMade:
    left_out = tuple(Idle(name, "it would slow all") for name in idle)
    return on.PlanMade(at_s, generation, clusters, (), left_out, "best of all", 0.1)


def state_of(events: Sequence[Event]) -> State:
    state = State()
    for event in events:
        apply(state, event)
    return state


def history(moves: Sequence[tuple[int, int]], start_s: float = 1000.0) -> list[Event]:
    """Read numbers as events."""
    told = _Telling(start_s)
    told.add(on.RunBegun(start_s, "run", 100, "1"), on.TokenIssued(start_s, "secret", start_s + 1e6, 4))
    for kind, choice in moves:
        told.now_s += choice / 2
        told.move(kind, choice)
    return told.events


class _Telling:
    """A history as it grows, with the state that says what is legal."""

    def __init__(self, start_s: float) -> None:
        self.now_s, self.state, self.events = start_s, State(), list[Event]()

    def add(self, *events: Event) -> None:
        for event in events:
            apply(self.state, event)
            self.events.append(event)

    def move(self, kind: int, choice: int) -> None:
        moves: tuple[Callable[[int], None], ...] = (
            self._connect, self._connect, self._connect, self._gone, self._plan, self._plan, self._plan, self._ready,
            self._ready, self._ready, self._ready, self._grant, self._grant, self._grant, self._settle, self._settle,
            self._settle, self._give_back, self._end, self._blame, self._rare,
        )  # fmt: skip
        moves[kind % len(moves)](choice)

    def _name(self, choice: int) -> str:
        return NAMES[choice % len(NAMES)]

    def _connect(self, choice: int) -> None:
        name = self._name(choice)
        member = self.state.members.get(name)
        if member is None:
            self.add(on.NodeEnrolled(self.now_s, name, f"key of {name}", "secret"))
        elif member.kicked is not None:
            return
        holding = self.state.generation if choice % 2 else 0
        self.add(connected(self.now_s, name, holding=holding, gflops=40.0 + choice // 6))

    def _gone(self, choice: int) -> None:
        self.add(on.NodeGone(self.now_s, self._name(choice), "its line broke", polite=choice % 2 == 0))

    def _plan(self, choice: int) -> None:
        free = self.state.free_nodes(self.now_s)
        generation = self.state.generation + 1
        members, rest = free[: 1 + choice % 3], free[1 + choice % 3 :]
        if len(members) < 2:
            self.add(on.PlanFailed(self.now_s, "too few", free))
        else:
            made = cluster(generation, *members, generation=generation)
            self.add(planned(self.now_s, made, idle=rest, generation=generation))

    def _ready(self, choice: int) -> None:
        forming = [c for c in self.state.live_clusters() if c.phase == "forming"]
        if forming:
            found = forming[choice % len(forming)]
            self.add(on.NodeReady(self.now_s, found.plan.id, found.missing[0]))
            self.add(on.LinkMade(self.now_s, found.plan.id, found.plan.members[0], found.plan.members[-1], "d", "", ""))

    def _live(self, choice: int) -> str | None:
        live = [c.plan.id for c in self.state.live_clusters()]
        return live[choice % len(live)] if live else None

    def _grant(self, choice: int) -> None:
        found = self._live(choice)
        batch = None if found is None else self.state.leases.grant(found, 50)
        if found is not None and batch is not None:
            self.add(on.LeaseGranted(self.now_s, found, batch))

    def _settle(self, choice: int) -> None:
        everybody = list(self.state.clusters) or ["nobody"]
        found = everybody[choice % len(everybody)]
        self.add(on.LeaseSettled(self.now_s, found, choice // 2))

    def _give_back(self, choice: int) -> None:
        found = self._live(choice)
        if found is not None:
            self.add(on.LeaseReturned(self.now_s, found, choice // 2, "it is slow"))

    def _end(self, choice: int) -> None:
        found = self._live(choice)
        if found is not None:
            self.add(on.ClusterEnded(self.now_s, found, "a member left", is_lost=choice % 2 == 0))

    def _blame(self, choice: int) -> None:
        self.add(on.NodeBlamed(self.now_s, self._name(choice), "its part failed"))

    def _rare(self, choice: int) -> None:
        name = self._name(choice)
        rare: tuple[Event, ...] = (
            on.NodeKicked(self.now_s, name, "it lied"),
            on.CallerRefused(self.now_s, "198.51.100.7", "a wrong token", 1 + choice),
            on.Noted(self.now_s, "all is well"),
            on.NodeMoved(self.now_s, name, Whereabouts((("192.0.2.1", 7),))),
            on.RunEnded(self.now_s, "enough"),
            on.RunBegun(self.now_s, f"run-{choice}", None, "2"),
        )
        self.add(rare[choice % len(rare)])
