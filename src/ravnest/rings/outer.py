"""What becomes of an average: the step from one reference to the next, the same on every member.

    plain      reference' = average
    nesterov   g = reference - average,   m' = b m + g,   reference' = reference - lr (g + b m')

Nesterov is the outer step of DiLoCo: what all clusters did since the last round is a gradient, and it gets momentum.
With lr = 1 and b = 0 it is the plain average but for rounding. Every operation is one correctly rounded float32
operation per element, in a fixed order: members with the same average, reference and momentum get the same bits.
"""

from __future__ import annotations

import numpy as np

from ravnest.core.config import config, require
from ravnest.rings.codec import Floats

__all__ = ["Nesterov", "step_nesterov", "step_plain"]

_BLOCK = 2**16  # elements that are worked on together: four arrays of them stay in the cache


@config
class Nesterov:
    """The outer rate and momentum; the defaults are DiLoCo's."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require(self.lr > 0, f"the outer lr is more than 0, not {self.lr}")
        require(0 <= self.momentum < 1, f"the outer momentum is at least 0 and less than 1, not {self.momentum}")


def step_plain(reference: Floats, average: Floats) -> None:
    """The average becomes the reference, in place."""
    np.copyto(reference, average)


def step_nesterov(reference: Floats, average: Floats, momentum: Floats, how: Nesterov) -> None:
    """One outer step: `reference` and `momentum` are changed in place, `average` is not."""
    require(reference.shape == average.shape == momentum.shape, "reference, average and momentum have one shape")
    lr, b = np.float32(how.lr), np.float32(how.momentum)
    gradient, scratch = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    for lo in range(0, reference.size, _BLOCK):
        w, m = reference[lo : lo + _BLOCK], momentum[lo : lo + _BLOCK]
        g, t = gradient[: w.size], scratch[: w.size]
        np.subtract(w, average[lo : lo + _BLOCK], out=g)
        np.multiply(m, b, out=m)
        np.add(m, g, out=m)
        np.multiply(m, b, out=t)
        np.add(g, t, out=t)
        np.multiply(t, lr, out=t)
        np.subtract(w, t, out=w)
