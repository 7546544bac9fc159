"""A cluster while it lives: its plan, its feed, what its members were told, and what came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.control import Part, Tell
from ..core.metrics import StageMetrics
from ..core.orders import EndAfter, Order, Save
from .events import Cluster
from .feed import FeedLine
from .feeder import Feeder
from .requester import Piece

__all__ = ["LiveCluster"]


class LiveCluster:
    """`lease()` gives the next batch and its pieces, or None; `settle(batch)` says that one is done.

    `broken(reason, blamed)` says that it cannot go on, and which members are at fault.
    """

    def __init__(
        self,
        plan: Cluster,
        parts: Sequence[Part],
        feeder: Feeder,
        lease: Callable[[LiveCluster], tuple[int, Sequence[Piece]] | None],
        settle: Callable[[LiveCluster, int, int], None],
        broken: Callable[[LiveCluster, str, tuple[str, ...]], None],
    ) -> None:
        self.plan, self.parts, self.feeder = plan, list(parts), feeder
        self.id, self.generation = plan.id, plan.generation
        self.is_training = False
        self.is_over = False
        self.retires: str | None = None  # why it gets nothing more to train, and ends when it has trained what it has
        self.retires_s = 0.0
        self.relay_tokens: list[str] = []
        self.max_weights_bytes: list[int] = []
        self.metrics: dict[int, StageMetrics] = {}
        self.orders: list[Order] = []
        self._own_orders: dict[str, list[Order]] = {}  # of one member alone
        self._lease, self._settle, self._broken = lease, settle, broken
        self._line: FeedLine | None = None

    def part_of(self, name: str) -> Part | None:
        stage = self.stage_of(name)
        return None if stage is None else self.parts[stage]

    def stage_of(self, name: str) -> int | None:
        return self.plan.members.index(name) if name in self.plan.members else None

    @property
    def least_updates(self) -> int:
        """That every stage has made, as they reported."""
        made = [self.metrics[i].updates if i in self.metrics else self.plan.begin for i in range(len(self.parts))]
        return min(made)

    def retold(self, name: str) -> list[Tell]:
        """All orders so far, for a member that comes back."""
        return [Tell(self.generation, order) for order in (*self.orders, *self._own_orders.get(name, ()))]

    def order_one(self, name: str, order: Order) -> Tell:
        """An order for one member."""
        older = self._own_orders.get(name, [])
        self._own_orders[name] = [o for o in older if type(o) is not type(order)] + [order]
        return Tell(self.generation, order)

    def end_after(self, updates: int) -> Tell:
        return self.order(EndAfter(updates))

    def save(self) -> Tell:
        return self.order(Save())

    def order(self, order: Order) -> Tell:
        """An order for all members; a newer one of its kind takes its place."""
        self.orders = [o for o in self.orders if type(o) is not type(order)] + [order]
        return Tell(self.generation, order)

    def start(self) -> None:
        """All members are ready."""
        self.is_training = True
        self.pump()

    def pump(self) -> None:
        """Send what there is to send, as long as the line takes it."""
        line = self._line
        while line is not None and line.has_room and self.is_training and not self.is_over:
            if self.retires is None and self.feeder.wants_batch and (leased := self._lease(self)) is not None:
                self.feeder.load(*leased)
            sending = self.feeder.next()
            if sending is None:
                return
            line.send(sending)

    @property
    def is_fed(self) -> bool:
        """Whether its root is on the line and has been sent something: another line would miss that."""
        return self._line is not None and self.feeder.has_sent

    def close(self) -> None:
        self.is_over = True
        line, self._line = self._line, None
        if line is not None:
            line.close()

    # what its feed tells

    def attached(self, line: FeedLine) -> None:
        older, self._line = self._line, line
        if older is not None:
            older.close()
        self.pump()

    def acknowledged(self, microbatch: int) -> None:
        settled = self.feeder.acknowledge(microbatch)
        if settled is not None:
            self._settle(self, *settled)
        self.pump()

    def room(self) -> None:
        self.pump()

    def detached(self, line: FeedLine, reason: str, *, is_fault: bool) -> None:
        if self._line is line:
            self._line = None
            root = self.plan.members[0]
            self._broken(self, f"the feed to {root} broke: {reason}", (root,) if is_fault else ())
