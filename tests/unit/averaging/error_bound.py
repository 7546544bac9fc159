"""The largest error of an element of an average, as `ravnest.averaging.codec` states it."""

from __future__ import annotations

__all__ = ["IN_BLOCKS", "error_bound"]

_RELATIVE = {
    "fp32": 0.0, "bf16": 2.0**-8, "int8": 1 / 254 * (1 + 2.0**-20), "int4": 1 / 14 * (1 + 2.0**-20), "top16": 1.0,
}  # fmt: skip
_TINY = {"fp32": 0.0, "bf16": 0.0, "int8": 254e-36, "int4": 14e-36, "top16": 0.0}  # scales below 1e-36 are sent as 0
IN_BLOCKS = ("int8", "int4", "top16")


def error_bound(codec: str, num_members: int, magnitude: float) -> float:
    """The bound for a sum that is encoded once per member, without earlier residuals and float32 rounding.

    `magnitude` is the weighted sum of the absolute contributions: of the element, for a codec `IN_BLOCKS` the largest
    of its block.
    """
    return magnitude * ((1 + _RELATIVE[codec]) ** num_members - 1) + num_members * _TINY[codec]
