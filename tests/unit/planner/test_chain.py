"""A program in numbers."""

from __future__ import annotations

from dataclasses import replace

from ravnest.planner import Chain, Storage


def test_cuts_that_share_the_weights() -> None:
    """A stage before the first weight, or after the last, would leave another with the whole model."""
    chain = Chain(
        forward_s=(1.0,) * 5,
        backward_s=(1.0,) * 5,
        cuts=(1, 2, 3, 4),
        forward_bytes=(0,) * 6,
        backward_bytes=(0,) * 6,
        weights=(Storage(8, (1,)), Storage(8, (3, 4))),
    )
    assert chain.sharing_weights().cuts == (2, 3)
    assert replace(chain, weights=()).sharing_weights().cuts == chain.cuts
