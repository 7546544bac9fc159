"""What makes a worker a stage: the order that says which, and how it trains."""

from __future__ import annotations

import msgspec

from ..core.config import require
from ..core.orders import EndAfter, Save, Stop
from ..core.schedule import Rule
from ..runtime.loop import Role
from ..runtime.settings import Settings

__all__ = ["Assign", "Orders"]


class Assign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """Be this stage. Its file follows as a buffer; its weights are in a file, or made from the seed (no path).

    `begin` is how many updates there have been. What was learnt by them is in the files `state`, as far as it is: the
    rest is as at the beginning.
    """

    settings: Settings
    rule: Rule
    role: Role
    max_batch: int
    threads: int
    core: int = -1  # to compute on, where the system lets one choose; -1 for any
    weights: str = ""
    begin: int = 0
    state: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.begin >= 0, f"begin is a number of updates, not {self.begin}")


Orders = Assign | EndAfter | Save | Stop
