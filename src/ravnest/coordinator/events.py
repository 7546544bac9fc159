"""Events of a coordinator, as frozen tagged structs: its state is the result of applying them in order (`apply`).

An event states a fact; `policy` decides about the consequences. `at_s` is unix time of the coordinator's clock,
read once when the event is created. Clocks of nodes are never used.
"""

from __future__ import annotations

from ravnest.core.config import Record
from ravnest.protocol.control import NodeProfile, ReplicaInfo
from ravnest.protocol.peer import PeerAddresses

__all__ = [
    "ClusterEnded",
    "ClusterSpec",
    "ConnectionRejected",
    "Event",
    "FleetSpeedEstimated",
    "IdleNode",
    "LeaseGranted",
    "LeaseReturned",
    "LeaseSettled",
    "LinkEstablished",
    "NodeAddressChanged",
    "NodeProfileChanged",
    "NodeAverageApplied",
    "NodeAverageReady",
    "NodeAveragingFailed",
    "NodeAveragingStarted",
    "NodeConnected",
    "NodeEnrolled",
    "NodeKicked",
    "NodeLeaving",
    "NodeLost",
    "NodeQuarantined",
    "NodeReady",
    "NodeReleased",
    "NodeRingsReady",
    "NodeSpeedEstimated",
    "NoteAdded",
    "PlanCreated",
    "PlanFailed",
    "ReplanConsidered",
    "ReplicaRecorded",
    "RingsFormed",
    "RoundClosed",
    "RoundCommitted",
    "RoundStarted",
    "RunEnded",
    "RunStarted",
    "TokenIssued",
]


class _Event(Record, frozen=True, tag=True):
    """A strict record with its class name as tag, and the time."""

    at_s: float


class ClusterSpec(Record, frozen=True, kw_only=True):
    """Nodes that hold one replica of the model: member i computes the ops from cut i - 1 to cut i.

    Training starts after `first_update` updates, from state that nodes hold. `repairs` is the failed cluster that this
    one replaces, if any: then it has weight in averages from its start.
    """

    id: str
    generation: int
    members: tuple[str, ...]
    cuts: tuple[int, ...]
    accumulate: int
    depths: tuple[int, ...]
    samples_per_s: float  # as planned
    reason: str
    stage_seconds: tuple[float, ...] = ()  # compute time per microbatch and stage, at the measured speed of its node
    first_update: int = 0
    restored_from: str = ""  # description of the sources of its state
    transfer_s: float = 0.0  # upper bound for the transfer of state to its members
    repairs: str = ""


class IdleNode(Record, frozen=True):
    """A node without an assignment, and the reason."""

    name: str
    reason: str


# The run.


class RunStarted(_Event, frozen=True):
    """A run starts, with `steps` batches or without a limit; clusters and leases of an earlier run are dropped.

    Batches before `first_batch` are already trained.
    """

    run: str
    steps: int | None
    release: str
    first_batch: int = 0


class RunEnded(_Event, frozen=True):
    reason: str


class NoteAdded(_Event, frozen=True):
    """A message for the log that changes no state."""

    text: str


# Nodes.


class TokenIssued(_Event, frozen=True):
    """A token allows enrollment until `expires_s` (unix time), `uses` times (None: without a limit)."""

    token: str
    expires_s: float
    uses: int | None


class NodeEnrolled(_Event, frozen=True):
    """A node received a certificate; `key` is the SHA-256 of its public key."""

    name: str
    key: str
    token: str


class NodeKicked(_Event, frozen=True):
    """A node was removed for good."""

    name: str
    reason: str


class NodeConnected(_Event, frozen=True):
    """A node connected or reconnected; `held_generation` is that of the assignment it still has, or 0."""

    name: str
    profile: NodeProfile
    peer_addresses: PeerAddresses
    address: str
    held_generation: int
    replicas: tuple[ReplicaInfo, ...] = ()


class NodeAddressChanged(_Event, frozen=True):
    """The addresses of a node's peer endpoint changed."""

    name: str
    peer_addresses: PeerAddresses


class NodeProfileChanged(_Event, frozen=True):
    """A node offers other resources."""

    name: str
    profile: NodeProfile


class NodeLost(_Event, frozen=True):
    """A node left (`is_voluntary`) or was declared lost."""

    name: str
    reason: str
    is_voluntary: bool


class NodeLeaving(_Event, frozen=True):
    """A node wants to leave, and stays until its state is replicated or a timeout passes."""

    name: str
    reason: str


class NodeQuarantined(_Event, frozen=True):
    """The stage of a node failed: plans prefer other nodes for a while.

    A node that `may_retry` is used all the same while there is no plan without it.
    """

    name: str
    reason: str
    may_retry: bool = True


class NodeSpeedEstimated(_Event, frozen=True):
    """A node computes at this multiple of the speed expected of it."""

    name: str
    speed_factor: float
    reason: str


class FleetSpeedEstimated(_Event, frozen=True):
    """At this job, nodes compute at this multiple of their measured speed."""

    speed_factor: float
    reason: str


class ConnectionRejected(_Event, frozen=True):
    """Connections were rejected, `count` times since the last such event."""

    address: str
    reason: str
    count: int


# Plans and clusters.


class PlanCreated(_Event, frozen=True):
    """New clusters of free nodes, and the other free nodes with the reasons why they have no assignment."""

    generation: int
    clusters: tuple[ClusterSpec, ...]
    spares: tuple[IdleNode, ...]
    left_out: tuple[IdleNode, ...]
    reason: str
    took_s: float


class PlanFailed(_Event, frozen=True):
    """These free nodes cannot form a cluster."""

    reason: str
    nodes: tuple[str, ...]


class LinkEstablished(_Event, frozen=True):
    """A node has a link to a peer: its kind, the reason why it is not a better one, and a hint to improve it."""

    cluster: str
    node: str
    peer: str
    kind: str
    reason: str
    hint: str


class NodeReady(_Event, frozen=True):
    """A member has loaded its stage and has its links."""

    cluster: str
    name: str


class NodeReleased(_Event, frozen=True):
    """A node has released its assignment, and holds a replica of its last state, if any."""

    name: str
    generation: int
    replica: ReplicaInfo | None = None


class ReplicaRecorded(_Event, frozen=True):
    """A node received a replica of the stage of another node, and stores it."""

    name: str
    source: str
    replica: ReplicaInfo
    num_bytes: int
    took_s: float


class ClusterEnded(_Event, frozen=True):
    """A cluster ended: its members are free, its leases are returned.

    `is_replanned`: it did not fail, and ends so that its members can form a better cluster.
    """

    cluster: str
    reason: str
    is_lost: bool
    is_replanned: bool = False


class ReplanConsidered(_Event, frozen=True):
    """A better plan of running clusters and these free nodes was searched; `ending_clusters` end for it."""

    nodes: tuple[str, ...]
    ending_clusters: tuple[str, ...]
    reason: str


# Averaging.


class RingsFormed(_Event, frozen=True):
    """New rings: the nodes of each ring, one of each of these clusters, in their order."""

    generation: int
    clusters: tuple[str, ...]
    rings: tuple[tuple[str, ...], ...]
    reason: str


class NodeRingsReady(_Event, frozen=True):
    """A node has all its links of this generation of rings."""

    name: str
    generation: int


class RoundStarted(_Event, frozen=True):
    """These clusters average, with weights; a further attempt of a round uses the same snapshots."""

    number: int
    attempt: int
    weights: dict[str, float]
    reason: str


class NodeAveragingStarted(_Event, frozen=True):
    """A node has taken its snapshot for a round."""

    name: str
    number: int


class NodeAverageReady(_Event, frozen=True):
    """A node has the averages of its rings; `digests` are by ring."""

    name: str
    number: int
    attempt: int
    digests: dict[int, str]


class NodeAveragingFailed(_Event, frozen=True):
    """An attempt failed at a node; `peer` did not answer or sent invalid values."""

    name: str
    number: int
    attempt: int
    reason: str
    peer: str


class RoundCommitted(_Event, frozen=True):
    """All members have the same averages, and apply them."""

    number: int
    attempt: int
    took_s: float


class NodeAverageApplied(_Event, frozen=True):
    """A node has applied the average of a round."""

    name: str
    number: int


class RoundClosed(_Event, frozen=True):
    """A round ended: all members have applied it, or it failed with `reason`."""

    number: int
    reason: str = ""


# Batches: up to thousands of these per second.


class LeaseGranted(_Event, frozen=True):
    cluster: str
    batch: int
    samples: int = 1


class LeaseSettled(_Event, frozen=True):
    cluster: str
    batch: int
    samples: int = 1


class LeaseReturned(_Event, frozen=True):
    cluster: str
    batch: int
    reason: str


Event = (
    RunStarted | RunEnded | NoteAdded
    | TokenIssued | NodeEnrolled | NodeKicked | NodeConnected | NodeAddressChanged
    | NodeProfileChanged | NodeLost | NodeLeaving
    | NodeQuarantined | NodeSpeedEstimated | FleetSpeedEstimated | ConnectionRejected
    | PlanCreated | PlanFailed | LinkEstablished | NodeReady | NodeReleased | ReplicaRecorded | ClusterEnded
    | ReplanConsidered
    | RingsFormed | NodeRingsReady | RoundStarted | NodeAveragingStarted | NodeAverageReady | NodeAveragingFailed
    | RoundCommitted | NodeAverageApplied | RoundClosed
    | LeaseGranted | LeaseSettled | LeaseReturned
)  # fmt: skip
