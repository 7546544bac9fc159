"""Carries out replication decisions: starts transfers of stage state between nodes, and records their results.

Both ends of a transfer get its number and a token for the relay. A transfer for a new assignment is over when that
stage is ready or has failed; a transfer of a replica to be stored ends with a report of its target.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ravnest.coordinator.context import CoordinatorContext
from ravnest.coordinator.events import ReplicaRecorded
from ravnest.coordinator.policy.replication import Replica, ReplicationPolicy, RestorePlan, decide_replication
from ravnest.errors import FrameError
from ravnest.protocol.control import (
    ReplicaInfo,
    ReplicaSource,
    ReplicaStored,
    SendReplica,
    StoreReplica,
)
from ravnest.protocol.peer import Peer

__all__ = ["ReplicationService"]

_TIMEOUT_S = 900.0
_NUM_TRANSFER_IDS = 2**31


@dataclass(frozen=True)
class _Transfer:
    source: str
    target: str
    replica: ReplicaInfo
    token: str
    start_s: float
    is_stored: bool


class ReplicationService:
    """All transfers of replicas; runs in the coordinator's loop."""

    def __init__(self, context: CoordinatorContext, policy: ReplicationPolicy) -> None:
        self._context, self.policy = context, policy
        self._transfers: dict[int, _Transfer] = {}

    def tick(self) -> None:
        """End stale transfers and start those that are due."""
        context = self._context
        now_s = context.now_s()
        for number, transfer in list(self._transfers.items()):
            if now_s >= transfer.start_s + _TIMEOUT_S or not self._is_alive(transfer):
                self._close(number)
        busy = {name for t in self._transfers.values() if t.is_stored for name in (t.source, t.target)}
        for wanted in decide_replication(context.state, now_s, self.policy, busy):
            replica = ReplicaInfo(wanted.cluster, wanted.stage, 0)
            number, transfer = self._open(wanted.source, wanted.target, replica, is_stored=True)
            context.send(wanted.target, StoreReplica(number, replica, self._peer(wanted.source, transfer.token)))

    def sources(self, members: Sequence[str], restore: RestorePlan) -> list[tuple[ReplicaSource, ...]]:
        """Sources of state for each member of a new cluster; commands other nodes to send their replicas."""
        return [
            tuple(self._source(name, replica) for replica in stage)
            for name, stage in zip(members, restore.stages, strict=True)
        ]

    def _source(self, name: str, replica: Replica) -> ReplicaSource:
        if replica.holder == name:
            return ReplicaSource(replica=replica.info)
        number, transfer = self._open(replica.holder, name, replica.info, is_stored=False)
        return ReplicaSource(replica=replica.info, source=self._peer(replica.holder, transfer.token), transfer=number)

    def handle_report(self, name: str, report: ReplicaStored) -> None:
        """A replica is stored at the target, or a transfer failed at either end."""
        transfer = self._transfers.get(report.transfer)
        if transfer is None:
            return
        if name not in (transfer.source, transfer.target):
            raise FrameError("the node reported a transfer between other nodes")
        if report.replica is not None:
            got, wanted = report.replica, transfer.replica
            is_same = (got.cluster, got.stage) == (wanted.cluster, wanted.stage)
            if not transfer.is_stored or name != transfer.target or not is_same:
                raise FrameError("the node reported another replica than the one it was sent")
            now_s = self._context.now_s()
            self._context.record(
                ReplicaRecorded(now_s, name, transfer.source, got, max(report.num_bytes, 0), now_s - transfer.start_s)
            )
        elif transfer.is_stored:
            self._context.note(f"no replica from {transfer.source} to {transfer.target}: {report.reason[:300]}")
        self._close(report.transfer)

    def _open(self, source: str, target: str, replica: ReplicaInfo, *, is_stored: bool) -> tuple[int, _Transfer]:
        """Start a transfer: command the source to send."""
        number, token = secrets.randbelow(_NUM_TRANSFER_IDS - 1) + 1, secrets.token_urlsafe(24)
        transfer = _Transfer(source, target, replica, token, self._context.now_s(), is_stored)
        self._context.relay.open(token, (source, target))
        self._transfers[number] = transfer
        self._context.send(source, SendReplica(number, replica, self._peer(target, token)))
        return number, transfer

    def _close(self, number: int) -> None:
        self._context.relay.close(self._transfers.pop(number).token)

    def _peer(self, name: str, token: str) -> Peer:
        return Peer(name=name, addresses=self._context.state.nodes[name].peer_addresses, relay_token=token)

    def _is_alive(self, transfer: _Transfer) -> bool:
        state = self._context.state
        return all(state.nodes[name].is_present for name in (transfer.source, transfer.target))
