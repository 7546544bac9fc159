"""State of a coordinator, as plain records. Only `apply` changes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

import msgspec

from ravnest.coordinator.event_log import printable
from ravnest.coordinator.events import ClusterSpec
from ravnest.coordinator.policy.leases import Leases
from ravnest.protocol.control import MAX_REPLICAS, NodeProfile, ReplicaInfo
from ravnest.protocol.peer import PeerAddresses

__all__ = [
    "QUARANTINE_S",
    "ClusterRecord",
    "CoordinatorState",
    "JoinToken",
    "LinkRecord",
    "Liveness",
    "Member",
    "NodeRecord",
    "Phase",
    "RejectionRecord",
    "ReplicaRecord",
    "RingsRecord",
    "RoundRecord",
    "new_event_log",
]

QUARANTINE_S = 300.0
_RELEASE_TIMEOUT_S = 10.0  # for a member of a cluster that ended to store the state of its stage
_RETRY_S, _MAX_RETRIES = 1.0, 5  # waits of 2, 4, 8, 16 and 32 s before a quarantined node is used that is needed
_MAX_RECENT_EVENTS = 500

Phase = Literal["forming", "training", "ended", "lost"]


class _Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A strict, mutable record."""


class JoinToken(_Record):
    """Allows a node to enroll."""

    expires_s: float
    uses: int | None
    used: int = 0


class Member(_Record):
    """A node with a certificate, connected or not."""

    key: str
    enrolled_s: float
    kick_reason: str | None = None


class ReplicaRecord(_Record):
    """A replica that a node holds, the time of its state, and the seconds its transfer took."""

    replica: ReplicaInfo
    at_s: float
    took_s: float = 0.0


class NodeRecord(_Record, kw_only=True):
    """A node that has connected. `reason` explains its present state.

    `releasing_s` is when its cluster ended, until it has stored the state of its stage. `speed_factor` is its speed as
    a multiple of the expected one; `num_losses` is the number of times that it was lost.
    """

    profile: NodeProfile
    peer_addresses: PeerAddresses
    address: str
    connected_s: float
    free_since_s: float
    held_generation: int = 0
    is_present: bool = True
    cluster: str | None = None
    reason: str = ""
    quarantined_s: float | None = None
    quarantine_reason: str = ""
    num_failures: int = 0  # each within the quarantine of the one before
    may_retry: bool = True
    replicas: list[ReplicaRecord] = []
    releasing_s: float | None = None
    leaving_s: float | None = None
    speed_factor: float = 1.0
    num_losses: int = 0

    def is_quarantined(self, now_s: float, quarantine_s: float) -> bool:
        return self.quarantined_s is not None and now_s < self.quarantined_s + quarantine_s

    def is_free(self, now_s: float, quarantine_s: float) -> bool:
        """Whether it can be planned."""
        return not self.is_quarantined(now_s, quarantine_s) and self._is_idle(now_s)

    def quarantine(self, at_s: float, reason: str, *, may_retry: bool) -> None:
        is_again = self.quarantined_s is not None and at_s < self.quarantined_s + QUARANTINE_S
        self.num_failures = self.num_failures + 1 if is_again else 1
        self.quarantined_s, self.quarantine_reason, self.may_retry = at_s, reason, may_retry

    def retry_s(self, quarantine_s: float) -> float:
        """When a quarantined node may be used if there is no plan without it: later after each failure."""
        assert self.quarantined_s is not None, "the node is not quarantined"
        if not self.may_retry or self.num_failures > _MAX_RETRIES:
            return self.quarantined_s + quarantine_s
        return self.quarantined_s + min(quarantine_s, _RETRY_S * 2.0**self.num_failures)

    def can_retry(self, now_s: float, quarantine_s: float) -> bool:
        """Whether it is quarantined, and can be planned if there is no plan without it."""
        is_waiting = self.is_quarantined(now_s, quarantine_s) and now_s >= self.retry_s(quarantine_s)
        return is_waiting and self._is_idle(now_s)

    def _is_idle(self, now_s: float) -> bool:
        if not self.is_present or self.cluster is not None:
            return False
        if self.leaving_s is not None:
            return False
        return self.releasing_s is None or now_s >= self.releasing_s + _RELEASE_TIMEOUT_S

    @property
    def free_from_s(self) -> float:
        """When it is free at the latest, without further events."""
        return self.free_since_s if self.releasing_s is None else self.releasing_s + _RELEASE_TIMEOUT_S

    def add_replica(self, held: ReplicaRecord) -> None:
        """Record a replica; one per stage, and no more than a node stores."""
        stage = (held.replica.cluster, held.replica.stage)
        others = [r for r in self.replicas if (r.replica.cluster, r.replica.stage) != stage]
        self.replicas = [*others, held][-MAX_REPLICAS:]


class LinkRecord(_Record):
    """The kind of a link, the reason why it is not a better one, and a hint to improve it."""

    kind: str
    reason: str
    hint: str = ""


class ClusterRecord(_Record, kw_only=True):
    """A cluster: its plan and progress. `links` are by the reporting node and its peer.

    `fed_batches` are batches and their samples in the order of steps, from step `plan.first_update + num_settled` on.
    """

    plan: ClusterSpec
    formed_s: float
    phase: Phase = "forming"
    ready: set[str] = set()
    training_since_s: float | None = None
    ended_s: float | None = None
    reason: str = ""
    links: dict[tuple[str, str], LinkRecord] = {}
    fed_batches: list[tuple[int, int]] = []
    num_settled: int = 0

    @property
    def is_live(self) -> bool:
        return self.phase in ("forming", "training")

    @property
    def not_ready(self) -> tuple[str, ...]:
        """Members that are not ready, in the order of stages."""
        return tuple(name for name in self.plan.members if name not in self.ready)


class RingsRecord(_Record):
    """The members of each ring; `ready` are the nodes that have all their ring links."""

    generation: int
    clusters: tuple[str, ...]
    rings: tuple[tuple[str, ...], ...]
    ready: set[str] = set()
    formed_s: float = 0.0

    @property
    def members(self) -> set[str]:
        return {name for ring in self.rings for name in ring}


class RoundRecord(_Record, kw_only=True):
    """An averaging round in progress: weights of clusters, and progress of members."""

    number: int
    attempt: int
    weights: dict[str, float]
    samples: dict[str, int] = {}  # of each cluster at the start of the round: those in the average
    started_s: float
    attempt_started_s: float
    started: set[str] = set()  # nodes with a snapshot
    digests: dict[str, dict[int, str]] = {}
    failed: dict[str, str] = {}  # by node: the peer that did not answer or sent invalid values
    is_committed: bool = False
    applied: set[str] = set()


class RejectionRecord(_Record):
    """Rejected connections from one address for one reason."""

    at_s: float
    address: str
    reason: str
    count: int


class Counters(_Record):
    """Numbers of events since the coordinator's first start, over all runs."""

    rejected: int = 0
    enrolled: int = 0
    kicked: int = 0
    left: int = 0
    lost: int = 0
    quarantined: int = 0
    plans_made: int = 0
    plans_failed: int = 0
    clusters_ended: int = 0
    clusters_lost: int = 0
    leases_ignored: int = 0  # settled by a cluster without such a lease


class LastSeen(_Record):
    """The last message of a node; `is_disconnected`: its connection ended since, and it may reconnect."""

    at_s: float
    activity: str = ""
    is_disconnected: bool = False


class Liveness:
    """The last message of every node. Excluded from equality: liveness is not part of the replicated state."""

    def __init__(self) -> None:
        self.last_seen: dict[str, LastSeen] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Liveness)

    __hash__ = None  # type: ignore[assignment]


def new_event_log() -> deque[tuple[float, str]]:
    return deque(maxlen=_MAX_RECENT_EVENTS)


class CoordinatorState(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Owned by one thread. `recent_events` are sentences with their times."""

    run: str = ""
    release: str = ""
    steps: int | None = None
    started_s: float = 0.0
    last_event_s: float = 0.0
    end_reason: str | None = None
    generation: int = 0
    has_trained: bool = False
    unplaceable: set[str] = set()  # nodes that the last plan had no place for
    tokens: dict[str, JoinToken] = {}
    members: dict[str, Member] = {}
    nodes: dict[str, NodeRecord] = {}
    clusters: dict[str, ClusterRecord] = {}  # in the order of forming; ended ones are dropped after a while
    cuts: dict[str, tuple[int, ...]] = {}  # of all clusters of this run, since nodes may hold replicas of them
    failed_clusters: list[str] = []  # ended clusters to be replaced
    replan_considered: set[str] | None = None  # free nodes in the last search for a better plan
    replan_considered_s: float = 0.0
    fleet_speed_factor: float = 1.0  # speed of all nodes at this job, as a multiple of their measured speed
    has_new_speeds: bool = False  # since the last search for a better plan
    leases: Leases = msgspec.field(default_factory=Leases)
    counters: Counters = msgspec.field(default_factory=Counters)
    rings: RingsRecord | None = None
    round: RoundRecord | None = None
    rounds_done: int = 0
    rounds_started: int = 0
    samples_since_average: dict[str, int] = {}  # settled, by cluster
    samples_trained: dict[str, int] = {}  # settled, by cluster
    averaged_clusters: set[str] = set()  # took part in a round
    rejections: list[RejectionRecord] = []
    recent_events: deque[tuple[float, str]] = msgspec.field(default_factory=new_event_log)
    liveness: Liveness = msgspec.field(default_factory=Liveness)

    def mark_seen(self, name: str, now_s: float, activity: str | None = None) -> None:
        """Note that a node has sent a message, with its current activity if the message states it."""
        known = self.liveness.last_seen.get(name)
        if activity is None:
            activity = known.activity if known is not None else ""
        self.liveness.last_seen[name] = LastSeen(now_s, activity)

    def mark_disconnected(self, name: str) -> None:
        """Note that the connection of a node ended."""
        last = self.last_seen(name)
        self.liveness.last_seen[name] = LastSeen(last.at_s, last.activity, is_disconnected=True)

    def reset_liveness(self, now_s: float) -> None:
        """Restart the liveness timeout of all present nodes, after this process was suspended."""
        for name, node in self.nodes.items():
            if node.is_present:
                self.mark_seen(name, now_s)

    def last_seen(self, name: str) -> LastSeen:
        return self.liveness.last_seen.get(name) or LastSeen(self.nodes[name].connected_s)

    def is_connected(self, name: str) -> bool:
        return self.nodes[name].is_present and not self.last_seen(name).is_disconnected

    def free_nodes(self, now_s: float, quarantine_s: float = QUARANTINE_S) -> tuple[str, ...]:
        """Names of nodes that can be planned. Disconnected ones cannot: they would not get their assignment."""
        free = (name for name, node in self.nodes.items() if node.is_free(now_s, quarantine_s))
        return tuple(sorted(name for name in free if not self.last_seen(name).is_disconnected))

    def retryable_nodes(self, now_s: float, quarantine_s: float) -> tuple[str, ...]:
        """Names of quarantined nodes that can be planned if there is no plan without them."""
        found = (name for name, node in self.nodes.items() if node.can_retry(now_s, quarantine_s))
        return tuple(sorted(name for name in found if not self.last_seen(name).is_disconnected))

    def idle_reason(self, name: str) -> str:
        """Why a node has no assignment."""
        node = self.nodes.get(name)
        return node.reason if node is not None else "not connected yet"

    def rejection_reason(self, name: str) -> str | None:
        """Why a node with a certificate of this name is rejected; None if it is a member."""
        member = self.members.get(name)
        if member is None:
            return f"{name} is not a member: join with a ticket"
        return None if member.kick_reason is None else f"{name} was removed by the requester: {member.kick_reason}"

    def is_training(self, cluster: str) -> bool:
        record = self.clusters.get(cluster)
        return record is not None and record.phase == "training"

    def live_clusters(self) -> Iterator[ClusterRecord]:
        """Clusters that are forming or training, the oldest first."""
        return (cluster for cluster in self.clusters.values() if cluster.is_live)

    @property
    def ring_members(self) -> set[str]:
        """Nodes that are in a ring."""
        return self.rings.members if self.rings is not None else set()

    def training_clusters(self) -> list[ClusterRecord]:
        return [cluster for cluster in self.clusters.values() if cluster.phase == "training"]

    def log(self, at_s: float, text: str) -> None:
        self.recent_events.append((at_s, printable(text)))
