"""All that can happen to a coordinator, as frozen tagged structs: its state is what these, in order, make of it.

An event says what happened, not what to do about it (`decide`). `at_s` is unix time of the coordinator's own clock,
read once by whoever makes the event; nodes' clocks count nowhere.
"""

from __future__ import annotations

import msgspec

from ..core.control import Copy, NodeProfile, Whereabouts

__all__ = [
    "CallerRefused", "Cluster", "ClusterEnded", "Considered", "CopyKept", "Event", "FleetPaced", "Idle",
    "LeaseGranted", "LeaseReturned", "LeaseSettled", "LinkMade", "NodeAveraged", "NodeBegan", "NodeBlamed",
    "NodeConnected", "NodeEnrolled", "NodeGone", "NodeKicked", "NodeLeaving", "NodeLetGo", "NodeLinked", "NodeMoved",
    "NodeNotAveraged", "NodeReady", "NodeShifted", "NodeSlowed", "Noted", "PlanFailed", "PlanMade", "RingsLaid",
    "RoundClosed", "RoundCommitted", "RoundOpened", "RunBegun", "RunEnded", "TokenIssued",
]  # fmt: skip


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A strict record."""


class _Event(_Record, frozen=True, tag=True):
    """A strict record with its name in it, and the time."""

    at_s: float


class Cluster(_Record, frozen=True, kw_only=True):
    """Nodes that hold one copy of the model: member i computes the ops from cut i - 1 to cut i, root first.

    It begins after `begin` updates, which it takes over from copies that nodes keep; `mends` is the cluster whose place
    it takes, if there is one: then it counts in averages from its start.
    """

    id: str
    generation: int
    members: tuple[str, ...]
    cuts: tuple[int, ...]
    accumulate: int
    depths: tuple[int, ...]
    samples_per_s: float  # as planned
    reason: str
    seconds: tuple[float, ...] = ()  # that each stage computes on a microbatch, at the speed that its node measured
    begin: int = 0
    begins: str = ""  # from what, in words
    moving_s: float = 0.0  # that copies may take to get to its members
    mends: str = ""


class Idle(_Record, frozen=True):
    """A node without a part, and why."""

    name: str
    reason: str


# The run.


class RunBegun(_Event, frozen=True):
    """Training starts, for this many batches or without end; an earlier run's clusters and leases are forgotten.

    The batches before `first` were trained in an earlier life of the run.
    """

    run: str
    steps: int | None
    release: str
    first: int = 0


class RunEnded(_Event, frozen=True):
    reason: str


class Noted(_Event, frozen=True):
    """Something that people should read and that changes nothing."""

    text: str


# Who may come, and who is there.


class TokenIssued(_Event, frozen=True):
    """Who shows this token may enrol, until then (unix time) and so many times (None: any number)."""

    token: str
    expires_s: float
    uses: int | None


class NodeEnrolled(_Event, frozen=True):
    """A node got its certificate; `key` is the SHA-256 of its public key."""

    name: str
    key: str
    token: str


class NodeKicked(_Event, frozen=True):
    """A node is sent away for good."""

    name: str
    reason: str


class NodeConnected(_Event, frozen=True):
    """A node said hello, perhaps again; `holding` is the generation of the part it still has, or 0."""

    name: str
    profile: NodeProfile
    where: Whereabouts
    address: str
    holding: int
    copies: tuple[Copy, ...] = ()


class NodeMoved(_Event, frozen=True):
    """A node's door is elsewhere now."""

    name: str
    where: Whereabouts


class NodeGone(_Event, frozen=True):
    """A node left (`polite`) or was declared lost."""

    name: str
    reason: str
    polite: bool


class NodeLeaving(_Event, frozen=True):
    """A node wants to leave, and stays until others have what it has learnt, or for a while."""

    name: str
    reason: str


class NodeBlamed(_Event, frozen=True):
    """A node's part failed, so that it is left out of plans for a while."""

    name: str
    reason: str


class NodeSlowed(_Event, frozen=True):
    """A node computes at this share of the speed that is to be expected of it, as its stage shows."""

    name: str
    share: float
    reason: str


class FleetPaced(_Event, frozen=True):
    """At this job, everybody computes at this share of the speed that they measured."""

    share: float
    reason: str


class CallerRefused(_Event, frozen=True):
    """Somebody was sent away, `count` times since the last such event."""

    address: str
    reason: str
    count: int


# Plans and clusters.


class PlanMade(_Event, frozen=True):
    """New clusters of nodes that were free, and why the others of them have no part."""

    generation: int
    clusters: tuple[Cluster, ...]
    spares: tuple[Idle, ...]
    left_out: tuple[Idle, ...]
    reason: str
    took_s: float


class PlanFailed(_Event, frozen=True):
    """These free nodes make no cluster."""

    reason: str
    nodes: tuple[str, ...]


class LinkMade(_Event, frozen=True):
    """Node a has a link to node b: how it came about, why not better, and what would make it better."""

    cluster: str
    a: str
    b: str
    how: str
    reason: str
    hint: str


class NodeReady(_Event, frozen=True):
    """A member has its stage loaded and its links made."""

    cluster: str
    name: str


class NodeLetGo(_Event, frozen=True):
    """Nothing is left of a node's part but the copy that it keeps of what the part had learnt, if any."""

    name: str
    generation: int
    copy: Copy | None = None


class CopyKept(_Event, frozen=True):
    """A node has got a copy of what another's stage has learnt, and keeps it."""

    name: str
    giver: str
    copy: Copy
    num_bytes: int
    took_s: float


class ClusterEnded(_Event, frozen=True):
    """A cluster trains no more: its members are free, its leases are given back.

    `again`: it has done nothing wrong, and ends so that its members can form a better one.
    """

    cluster: str
    reason: str
    is_lost: bool
    again: bool = False


class Considered(_Event, frozen=True):
    """A better plan of running clusters and these free nodes was looked for; if there is one, these clusters end."""

    nodes: tuple[str, ...]
    ends: tuple[str, ...]
    reason: str


# Averaging.


class RingsLaid(_Event, frozen=True):
    """Who averages with whom from now on: for each ring the nodes, one of each of these clusters, in their order."""

    generation: int
    clusters: tuple[str, ...]
    rings: tuple[tuple[str, ...], ...]
    reason: str


class NodeLinked(_Event, frozen=True):
    """A node has all its ring links of this generation of the rings."""

    name: str
    generation: int


class RoundOpened(_Event, frozen=True):
    """These clusters average, with weights; another attempt of the same round starts from the same snapshots."""

    number: int
    attempt: int
    weights: dict[str, float]
    reason: str


class NodeBegan(_Event, frozen=True):
    """A node has its snapshot of a round."""

    name: str
    number: int


class NodeAveraged(_Event, frozen=True):
    """A node has the averages of its rings; `digests` says which, by ring."""

    name: str
    number: int
    attempt: int
    digests: dict[int, str]


class NodeNotAveraged(_Event, frozen=True):
    """An attempt failed at a node; `peer` is who did not answer, or whose numbers were refused."""

    name: str
    number: int
    attempt: int
    reason: str
    peer: str


class RoundCommitted(_Event, frozen=True):
    """All have the same averages, and take them over."""

    number: int
    attempt: int
    took_s: float


class NodeShifted(_Event, frozen=True):
    """A node has taken over the average of a round."""

    name: str
    number: int


class RoundClosed(_Event, frozen=True):
    """A round is over: everybody has taken it over, or (`reason`) nothing came of it."""

    number: int
    reason: str = ""


# Batches: some of these come a thousand times a second.


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
    RunBegun | RunEnded | Noted
    | TokenIssued | NodeEnrolled | NodeKicked | NodeConnected | NodeMoved | NodeGone | NodeLeaving
    | NodeBlamed | NodeSlowed | FleetPaced
    | CallerRefused
    | PlanMade | PlanFailed | LinkMade | NodeReady | NodeLetGo | CopyKept | ClusterEnded
    | Considered
    | RingsLaid | NodeLinked | RoundOpened | NodeBegan | NodeAveraged | NodeNotAveraged | RoundCommitted | NodeShifted
    | RoundClosed
    | LeaseGranted | LeaseSettled | LeaseReturned
)  # fmt: skip
