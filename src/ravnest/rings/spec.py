"""A ring as its members agree on it: who, in which order, with which weights, in which form.

    result = sum over members i of  share[i] * vector[i],       share[i] = weight[i] / sum of all weights

All members have the same `RingSpec` but for `me`. The order of the members is the direction of the ring.
"""

from __future__ import annotations

import math

from ravnest.core.config import config, require
from ravnest.rings.codec import find_codec

__all__ = ["RingSpec"]


@config
class RingSpec:
    """One ring, seen by member `me`. Pieces of `piece_elements` float32: a megabyte unless lines are slow."""

    id: int
    members: tuple[str, ...]
    me: str
    weights: tuple[float, ...]
    codec: str = "fp32"
    piece_elements: int = 2**18

    def __post_init__(self) -> None:
        require(self.id >= 0, f"a ring's id is 0 or more, not {self.id}")
        require(len(set(self.members)) == len(self.members), f"a member is named twice in {self.members}")
        require(self.me in self.members, f"{self.me} is not one of the members {self.members}")
        require(len(self.weights) == len(self.members), "there is one weight for each member")
        require(all(math.isfinite(w) and w >= 0 for w in self.weights), f"weights are 0 or more, not {self.weights}")
        require(math.isfinite(sum(self.weights)) and sum(self.weights) > 0, "some member has a weight above 0")
        require(self.piece_elements > 0, f"a piece has at least 1 element, not {self.piece_elements}")
        find_codec(self.codec)

    @property
    def position(self) -> int:
        return self.members.index(self.me)

    @property
    def share(self) -> float:
        return self.weights[self.position] / math.fsum(self.weights)

    @property
    def share_before(self) -> float:
        """Of the member before."""
        return self.weights[self.position - 1] / math.fsum(self.weights)

    @property
    def before(self) -> str:
        """Who sends to this member."""
        return self.members[self.position - 1]

    @property
    def after(self) -> str:
        """Whom this member sends to."""
        return self.members[(self.position + 1) % len(self.members)]
