"""What a coordinator's state is made of: plain records, each about one thing. Only `state.apply` changes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

import msgspec

from ..core.control import MOST_COPIES, Copy, NodeProfile, Whereabouts
from .events import Cluster
from .leases import Leases
from .sentences import plain

__all__ = [
    "BLAME_S", "ClusterRecord", "Counters", "Heard", "Hearing", "KeptCopy", "LinkRecord", "Member", "NodeRecord",
    "Phase", "Refusal", "RingsRecord", "RoundRecord", "State", "Token", "no_words",
]  # fmt: skip

BLAME_S = 300.0
_LET_GO_S = 10.0  # that a member of a cluster that ended has to put down what it learnt
_MOST_WORDS = 500

Phase = Literal["forming", "training", "ended", "lost"]


class _Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Strict, and changed in place."""


class Token(_Record):
    """Who shows it may enrol."""

    expires_s: float
    uses: int | None
    used: int = 0


class Member(_Record):
    """A node with a certificate, whether or not it is there."""

    key: str
    enrolled_s: float
    kicked: str | None = None


class KeptCopy(_Record):
    """A copy that a node keeps, as of when, and how long it took to get there."""

    copy: Copy
    at_s: float
    took_s: float = 0.0


class NodeRecord(_Record, kw_only=True):
    """A node that has connected in this coordinator's life. `why` is the reason of its present state.

    `letting_go_s` is when its cluster ended, until it has put down what its part had learnt. `speed` is the share of
    what is to be expected of it that its stages showed it to have; `losses` counts how often it was lost.
    """

    profile: NodeProfile
    where: Whereabouts
    address: str
    connected_s: float
    free_since_s: float
    holding: int = 0
    is_present: bool = True
    cluster: str | None = None
    why: str = ""
    blamed_s: float | None = None
    blame: str = ""
    copies: list[KeptCopy] = []
    letting_go_s: float | None = None
    leaving_s: float | None = None
    speed: float = 1.0
    losses: int = 0

    def is_blamed(self, now_s: float, blame_s: float) -> bool:
        return self.blamed_s is not None and now_s < self.blamed_s + blame_s

    def is_free(self, now_s: float, blame_s: float) -> bool:
        """Whether a plan may have it."""
        if not self.is_present or self.cluster is not None or self.is_blamed(now_s, blame_s):
            return False
        if self.leaving_s is not None:
            return False
        return self.letting_go_s is None or now_s >= self.letting_go_s + _LET_GO_S

    @property
    def free_from_s(self) -> float:
        """When it is free at the latest, if nothing else happens."""
        return self.free_since_s if self.letting_go_s is None else self.letting_go_s + _LET_GO_S

    def keep(self, kept: KeptCopy) -> None:
        """Of every stage the newest, and no more than the node keeps."""
        same = (kept.copy.cluster, kept.copy.stage)
        others = [c for c in self.copies if (c.copy.cluster, c.copy.stage) != same]
        self.copies = [*others, kept][-MOST_COPIES:]


class LinkRecord(_Record):
    """How a link came about, why not better, and what would make it better."""

    how: str
    reason: str
    hint: str = ""


class ClusterRecord(_Record, kw_only=True):
    """A cluster: its plan, how far it is, and why. `links` are by the node that told of one and its peer.

    `fed` are batches and their samples, in the order of its windows, from window `plan.begin + done` on.
    """

    plan: Cluster
    formed_s: float
    phase: Phase = "forming"
    ready: set[str] = set()
    trains_since_s: float | None = None
    ended_s: float | None = None
    why: str = ""
    links: dict[tuple[str, str], LinkRecord] = {}
    fed: list[tuple[int, int]] = []
    done: int = 0

    @property
    def is_live(self) -> bool:
        return self.phase in ("forming", "training")

    @property
    def missing(self) -> tuple[str, ...]:
        """Members that are not ready, root first."""
        return tuple(name for name in self.plan.members if name not in self.ready)


class RingsRecord(_Record):
    """Who averages with whom: members of each ring; `ready` are nodes that have all their links."""

    generation: int
    clusters: tuple[str, ...]
    rings: tuple[tuple[str, ...], ...]
    ready: set[str] = set()
    laid_s: float = 0.0

    @property
    def members(self) -> set[str]:
        return {name for ring in self.rings for name in ring}


class RoundRecord(_Record, kw_only=True):
    """An averaging under way: clusters with their weights, and how far its members are."""

    number: int
    attempt: int
    weights: dict[str, float]
    counted: dict[str, int] = {}  # samples of each cluster when the round was opened: those that the average has
    opened_s: float
    began_s: float  # this attempt
    begun: set[str] = set()  # who has its snapshot
    averaged: dict[str, dict[int, str]] = {}
    failed: dict[str, str] = {}  # by node: who did not answer, or whose numbers were refused
    is_committed: bool = False
    shifted: set[str] = set()


class Refusal(_Record):
    """Callers sent away."""

    at_s: float
    address: str
    reason: str
    count: int


class Counters(_Record):
    """How often things happened: since the coordinator's first start, over all runs."""

    refused: int = 0
    enrolled: int = 0
    kicked: int = 0
    left: int = 0
    lost: int = 0
    blamed: int = 0
    plans_made: int = 0
    plans_failed: int = 0
    clusters_ended: int = 0
    clusters_lost: int = 0
    leases_ignored: int = 0  # settled by a cluster that had no such lease


class Heard(_Record):
    """The last that was heard of a node; `is_away`: its connection ended since, and it may yet come back."""

    at_s: float
    doing: str = ""
    is_away: bool = False


class Hearing:
    """The last beat of every node. Any two are equal: what is heard is no part of what is known."""

    def __init__(self) -> None:
        self.of: dict[str, Heard] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hearing)

    __hash__ = None  # type: ignore[assignment]


def no_words() -> deque[tuple[float, str]]:
    return deque(maxlen=_MOST_WORDS)


class State(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Owned by one thread. `words` are the latest events as sentences, with their times."""

    run: str = ""
    release: str = ""
    steps: int | None = None
    begun_s: float = 0.0
    ended: str | None = None
    generation: int = 0
    has_trained: bool = False
    hopeless: set[str] = set()  # nodes of which the last plan made nothing
    tokens: dict[str, Token] = {}
    members: dict[str, Member] = {}
    nodes: dict[str, NodeRecord] = {}
    clusters: dict[str, ClusterRecord] = {}  # in order of forming; of those that ended, the last few
    cuts: dict[str, tuple[int, ...]] = {}  # of clusters of this run, for as long as somebody may keep a copy
    broken: list[str] = []  # clusters that were lost and that none has taken the place of
    considered: set[str] | None = None  # free nodes with which a better plan was looked for since the last one
    considered_s: float = 0.0
    pace: float = 1.0  # of what nodes measured, what they all have at this job
    has_new_speeds: bool = False  # since a better plan was last looked for
    leases: Leases = msgspec.field(default_factory=Leases)
    counters: Counters = msgspec.field(default_factory=Counters)
    rings: RingsRecord | None = None
    round: RoundRecord | None = None
    rounds_done: int = 0
    rounds_begun: int = 0
    since: dict[str, int] = {}  # samples that each cluster has settled since it last averaged
    trained: dict[str, int] = {}  # samples that each cluster has settled in all
    averaged: set[str] = set()  # clusters that have taken part in a round
    refusals: list[Refusal] = []
    words: deque[tuple[float, str]] = msgspec.field(default_factory=no_words)
    hearing: Hearing = msgspec.field(default_factory=Hearing)

    def heard(self, name: str, now_s: float, doing: str | None = None) -> None:
        """A node gave a sign of life, and perhaps said what it does."""
        known = self.hearing.of.get(name)
        if doing is None:
            doing = known.doing if known is not None else ""
        self.hearing.of[name] = Heard(now_s, doing)

    def broke_off(self, name: str) -> None:
        """A node's connection ended."""
        last = self.last_heard(name)
        self.hearing.of[name] = Heard(last.at_s, last.doing, is_away=True)

    def wake(self, now_s: float) -> None:
        """After a restart: whoever was there has from now on time to be heard again."""
        for name, node in self.nodes.items():
            if node.is_present:
                self.heard(name, now_s)

    def last_heard(self, name: str) -> Heard:
        return self.hearing.of.get(name) or Heard(self.nodes[name].connected_s)

    def free_nodes(self, now_s: float, blame_s: float = BLAME_S) -> tuple[str, ...]:
        """Those whom a plan may have, by name: not who is away, for it could not be told."""
        free = (name for name, node in self.nodes.items() if node.is_free(now_s, blame_s))
        return tuple(sorted(name for name in free if not self.last_heard(name).is_away))

    def why_free(self, name: str) -> str:
        """Why a node has no part, in words."""
        node = self.nodes.get(name)
        return node.why if node is not None else "it has not connected yet"

    def why_not_member(self, name: str) -> str | None:
        """Why somebody with a certificate in this name may not come in; None: they may."""
        member = self.members.get(name)
        if member is None:
            return f"{name} is not known here: join with a ticket"
        return None if member.kicked is None else f"{name} was sent away for good: {member.kicked}"

    def is_training(self, cluster: str) -> bool:
        found = self.clusters.get(cluster)
        return found is not None and found.phase == "training"

    def live_clusters(self) -> Iterator[ClusterRecord]:
        """Those that are forming or training, the oldest first."""
        return (cluster for cluster in self.clusters.values() if cluster.is_live)

    @property
    def ring_members(self) -> set[str]:
        """Nodes that average with others."""
        return self.rings.members if self.rings is not None else set()

    def training_clusters(self) -> list[ClusterRecord]:
        return [cluster for cluster in self.clusters.values() if cluster.phase == "training"]

    def say(self, at_s: float, text: str) -> None:
        self.words.append((at_s, plain(text)))
