"""The outer optimizer: turns an average into the next reference weights, identically on every member.

    plain      reference' = average
    nesterov   g = reference - average,   m' = b m + g,   reference' = reference - lr (g + b m')

Nesterov is the outer step of DiLoCo: the change of all clusters since the last round is a gradient, with momentum.
With lr = 1 and b = 0 it equals the plain average but for rounding. Every operation is one correctly rounded float32
operation per element, in a fixed order: members with the same average, reference and momentum get the same bits.
"""

from __future__ import annotations

import numpy as np

from ravnest.averaging.codec import Floats
from ravnest.core.config import config, require

__all__ = ["Nesterov", "OuterStep", "step_nesterov"]

_BLOCK = 2**16  # elements processed together: four arrays of them fit the cache


@config
class Nesterov:
    """Learning rate and momentum of the outer step; the defaults are those of DiLoCo."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require(self.lr > 0, f"outer lr must be > 0, got {self.lr}")
        require(0 <= self.momentum < 1, f"outer momentum must be >= 0 and < 1, got {self.momentum}")


def step_nesterov(reference: Floats, average: Floats, momentum: Floats, nesterov: Nesterov) -> None:
    """Apply one outer step to `reference` and `momentum` in place."""
    require(
        reference.shape == average.shape == momentum.shape, "reference, average and momentum must have the same shape"
    )
    lr, b = np.float32(nesterov.lr), np.float32(nesterov.momentum)
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


class OuterStep:
    """Keeps the reference weights and the momentum of one ring. The first average only initializes them."""

    def __init__(self, nesterov: Nesterov) -> None:
        self._nesterov = nesterov
        self._reference: Floats | None = None
        self._momentum = np.empty(0, np.float32)

    def apply(self, average: Floats) -> None:
        """Replace an average by the result of the outer step, in place."""
        if self._reference is None:
            self._reference, self._momentum = average.copy(), np.zeros_like(average)
            return
        step_nesterov(self._reference, average, self._momentum, self._nesterov)
        np.copyto(average, self._reference)
