"""Random valid histories: a list of small numbers is read as events, each valid where it stands.

Numbers, so that hypothesis can shrink a failing history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from ravnest.coordinator import events as on
from ravnest.coordinator.apply import apply
from ravnest.coordinator.events import ClusterSpec, Event, IdleNode
from ravnest.coordinator.state import CoordinatorState
from ravnest.protocol.control import NodeProfile
from ravnest.protocol.peer import PeerAddresses

PROFILE = NodeProfile(memory_bytes=8_000_000_000, gflops=40.0)
NAMES = ("attic", "barn", "cellar", "den", "eaves", "foyer")

_moves = st.tuples(st.integers(0, 20), st.integers(0, 11))
numbers = st.lists(_moves, max_size=12) | st.lists(_moves, min_size=30, max_size=90)


def connected(at_s: float, name: str, *, holding: int = 0, gflops: float = 40.0, host: str = "") -> on.NodeConnected:
    profile = NodeProfile(memory_bytes=8_000_000_000, gflops=gflops)
    where = PeerAddresses((), (host, 4000)) if host else PeerAddresses()
    return on.NodeConnected(at_s, name, profile, where, f"{host or '203.0.113.1'}:4000", holding)


def cluster(number: int, *members: str, generation: int = 1) -> ClusterSpec:
    return ClusterSpec(
        id=f"c{number}", generation=generation, members=members, cuts=tuple(range(1, len(members))), accumulate=4,
        depths=tuple(range(len(members), 0, -1)), samples_per_s=10.0, reason="it fits",
    )  # fmt: skip


def planned(at_s: float, *clusters: ClusterSpec, idle: Sequence[str] = (), generation: int = 1) -> on.PlanCreated:
    left_out = tuple(IdleNode(name, "it would slow all") for name in idle)
    return on.PlanCreated(at_s, generation, clusters, (), left_out, "best of all", 0.1)


def state_of(events: Sequence[Event]) -> CoordinatorState:
    state = CoordinatorState()
    for event in events:
        apply(state, event)
    return state


def history(moves: Sequence[tuple[int, int]], start_s: float = 1000.0) -> list[Event]:
    """Read numbers as events."""
    growing = _History(start_s)
    growing.add(on.RunStarted(start_s, "run", 100, "1"), on.TokenIssued(start_s, "secret", start_s + 1e6, 4))
    for kind, choice in moves:
        growing.now_s += choice / 2
        growing.move(kind, choice)
    return growing.events


class _History:
    """A growing history, with the state that determines valid events."""

    def __init__(self, start_s: float) -> None:
        self.now_s, self.state, self.events = start_s, CoordinatorState(), list[Event]()

    def add(self, *events: Event) -> None:
        for event in events:
            apply(self.state, event)
            self.events.append(event)

    def move(self, kind: int, choice: int) -> None:
        moves: tuple[Callable[[int], None], ...] = (
            self._connect, self._connect, self._connect, self._lose, self._plan, self._plan, self._plan, self._ready,
            self._ready, self._ready, self._ready, self._grant, self._grant, self._grant, self._settle, self._settle,
            self._settle, self._return, self._end, self._quarantine, self._rare,
        )  # fmt: skip
        moves[kind % len(moves)](choice)

    def _name(self, choice: int) -> str:
        return NAMES[choice % len(NAMES)]

    def _connect(self, choice: int) -> None:
        name = self._name(choice)
        member = self.state.members.get(name)
        if member is None:
            self.add(on.NodeEnrolled(self.now_s, name, f"key of {name}", "secret"))
        elif member.kick_reason is not None:
            return
        holding = self.state.generation if choice % 2 else 0
        self.add(connected(self.now_s, name, holding=holding, gflops=40.0 + choice // 6))

    def _lose(self, choice: int) -> None:
        self.add(on.NodeLost(self.now_s, self._name(choice), "its connection failed", is_voluntary=choice % 2 == 0))

    def _plan(self, choice: int) -> None:
        free = self.state.free_nodes(self.now_s)
        generation = self.state.generation + 1
        members, rest = free[: 1 + choice % 3], free[1 + choice % 3 :]
        if len(members) < 2:
            self.add(on.PlanFailed(self.now_s, "too few", free))
        else:
            new = cluster(generation, *members, generation=generation)
            self.add(planned(self.now_s, new, idle=rest, generation=generation))

    def _ready(self, choice: int) -> None:
        forming = [c for c in self.state.live_clusters() if c.phase == "forming"]
        if forming:
            found = forming[choice % len(forming)]
            self.add(on.NodeReady(self.now_s, found.plan.id, found.not_ready[0]))
            self.add(
                on.LinkEstablished(
                    self.now_s, found.plan.id, found.plan.members[0], found.plan.members[-1], "d", "", ""
                )
            )

    def _live(self, choice: int) -> str | None:
        live = [c.plan.id for c in self.state.live_clusters()]
        return live[choice % len(live)] if live else None

    def _grant(self, choice: int) -> None:
        found = self._live(choice)
        batch = None if found is None else self.state.leases.next_batch(found, 50)
        if found is not None and batch is not None:
            self.add(on.LeaseGranted(self.now_s, found, batch))

    def _settle(self, choice: int) -> None:
        clusters = list(self.state.clusters) or ["unknown"]
        found = clusters[choice % len(clusters)]
        self.add(on.LeaseSettled(self.now_s, found, choice // 2))

    def _return(self, choice: int) -> None:
        found = self._live(choice)
        if found is not None:
            self.add(on.LeaseReturned(self.now_s, found, choice // 2, "it is slow"))

    def _end(self, choice: int) -> None:
        found = self._live(choice)
        if found is not None:
            self.add(on.ClusterEnded(self.now_s, found, "a member left", is_lost=choice % 2 == 0))

    def _quarantine(self, choice: int) -> None:
        self.add(on.NodeQuarantined(self.now_s, self._name(choice), "its stage failed"))

    def _rare(self, choice: int) -> None:
        name = self._name(choice)
        rare: tuple[Event, ...] = (
            on.NodeKicked(self.now_s, name, "it lied"),
            on.ConnectionRejected(self.now_s, "198.51.100.7", "a wrong token", 1 + choice),
            on.NoteAdded(self.now_s, "all is well"),
            on.NodeAddressChanged(self.now_s, name, PeerAddresses((("192.0.2.1", 7),))),
            on.RunEnded(self.now_s, "enough"),
            on.RunStarted(self.now_s, f"run-{choice}", None, "2"),
        )
        self.add(rare[choice % len(rare)])
