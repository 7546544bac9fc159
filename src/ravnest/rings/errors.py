"""What can go wrong in a ring, with who is to blame.

RavnestError
└── RingFailed        a ring that did not come to its end in an attempt
    └── BadContribution   ... because a member's numbers are infinite or not numbers
"""

from __future__ import annotations

from ravnest.core.errors import RavnestError

__all__ = ["BadContribution", "RingFailed"]


class RingFailed(RavnestError):
    """Ring `ring` failed; `member` is who it failed on, as far as this node knows."""

    def __init__(self, ring: int, member: str, why: str) -> None:
        super().__init__(f"ring {ring} failed: {why}")
        self.ring, self.member, self.why = ring, member, why


class BadContribution(RingFailed):
    """A member brought numbers that cannot be averaged; nothing of them was passed on."""
