"""Contributions of nodes, counted from the leases.

A settled batch was trained by every stage of its cluster. The stage's share of the model's compute is measured in
seconds of the requester's machine, so that for each batch

    work of a node = samples * share of its stage            sum over the nodes of a cluster = samples of the batch

and the work of all nodes adds up to the samples that the run has trained. A batch that was trained twice counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ravnest.core.metrics import StageMetrics

__all__ = ["NodeContribution", "Contributions"]


class NodeContribution(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Totals of one node. `samples` passed through it; `work` is its part of them, in samples of the whole model."""

    batches: int = 0
    samples: int = 0
    work: float = 0.0
    seconds: float = 0.0  # as a member of a cluster that trains
    busy_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0

    def plus(self, other: NodeContribution) -> NodeContribution:
        mine, others = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return NodeContribution(**{name: value + others[name] for name, value in mine.items()})


@dataclass
class _Account:
    """A cluster that is forming or training."""

    members: tuple[str, ...]
    shares: tuple[float, ...]
    batches: int = 0
    samples: int = 0
    began_s: float | None = None
    stages: dict[int, StageMetrics] = field(default_factory=dict)

    def of(self, stage: int, now_s: float) -> NodeContribution:
        metrics = self.stages.get(stage, StageMetrics())
        return NodeContribution(
            batches=self.batches, samples=self.samples, work=self.samples * self.shares[stage],
            seconds=0.0 if self.began_s is None else max(now_s - self.began_s, 0.0), busy_s=metrics.busy_s,
            sent_bytes=metrics.sent_bytes, received_bytes=metrics.received_bytes,
        )  # fmt: skip


class Contributions:
    """`past` are the totals of clusters that have ended, by node; `batches` and `samples` are those of the run."""

    def __init__(
        self, past: Mapping[str, NodeContribution] | None = None, *, batches: int = 0, samples: int = 0
    ) -> None:
        self.past = dict(past or {})
        self.batches, self.samples = batches, samples
        self._live: dict[str, _Account] = {}

    def form(self, cluster: str, members: Sequence[str], shares: Sequence[float]) -> None:
        """Open the account of a cluster; shares are scaled to a sum of 1."""
        total = sum(shares)
        scaled = tuple(share / total for share in shares) if total > 0 else (1 / len(members),) * len(members)
        self._live[cluster] = _Account(tuple(members), scaled)

    def begin(self, cluster: str, at_s: float) -> None:
        """All members are ready: the cluster trains."""
        if cluster in self._live and self._live[cluster].began_s is None:
            self._live[cluster].began_s = at_s

    def settle(self, cluster: str, samples: int) -> None:
        """Count a batch that this cluster has trained first."""
        if cluster in self._live:
            self.batches += 1
            self.samples += samples
            self._live[cluster].batches += 1
            self._live[cluster].samples += samples

    def report(self, cluster: str, metrics: StageMetrics) -> None:
        """Set the counters of a stage."""
        if cluster in self._live and 0 <= metrics.stage < len(self._live[cluster].members):
            self._live[cluster].stages[metrics.stage] = metrics

    def end(self, cluster: str, at_s: float) -> None:
        """Move the account of a cluster that ended into the past."""
        if cluster in self._live:
            self.past = self.totals(at_s, only=cluster)
            del self._live[cluster]

    def totals(self, now_s: float, only: str | None = None) -> dict[str, NodeContribution]:
        """Return the totals by node, of the past and of all live clusters, or of `only` this one."""
        totals = dict(self.past)
        for cluster, account in self._live.items():
            if only is None or cluster == only:
                for stage, name in enumerate(account.members):
                    totals[name] = totals.get(name, NodeContribution()).plus(account.of(stage, now_s))
        return totals
