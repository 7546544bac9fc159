"""The errors the world can cause, each with a sentence that says what to do.

    RavnestError
    ├── TraceError        a model that cannot be turned into a program
    │   └── UnsupportedOp     ... because it calls an operation outside the allow-list
    ├── CutError          a cut that is not possible at that place
    ├── ProgramError      a stage file that is malformed, not allowed or too big
    ├── WeightsError      a weights file that is malformed or does not fit the stage
    ├── LinkError         a link between two nodes that failed
    │   ├── FrameError        ... because a message is malformed, too big or not expected
    │   ├── HandshakeError    ... because the two sides do not trust each other
    │   ├── LinkClosed        ... because one side closed it or died
    │   └── LinkTimeout       ... because a deadline passed
    ├── IdentityError     a key, certificate or signing request that cannot be used
    ├── PlanError         no plan is possible (in `plan`: TooManyNodes, DoesNotFit)
    ├── RingFailed        an averaging that did not come to its end (in `rings`, with BadContribution below it)
    ├── WorkerLost        a worker process that ended before its work did
    └── NotFinite         a loss that became infinite or not a number

A user's own mistake in a call is a `ValueError`; a bug of ours is an `AssertionError`.
"""

from __future__ import annotations

__all__ = [
    "CutError",
    "FrameError",
    "HandshakeError",
    "IdentityError",
    "LinkClosed",
    "LinkError",
    "LinkTimeout",
    "NotFinite",
    "PlanError",
    "ProgramError",
    "RavnestError",
    "TraceError",
    "UnsupportedOp",
    "WeightsError",
    "WorkerLost",
]


class RavnestError(Exception):
    """Something the world did; the message says what to do about it."""


class TraceError(RavnestError):
    """The model and its loss cannot be turned into a program."""


class UnsupportedOp(TraceError):
    """The model calls an operation that is not on the allow-list."""


class CutError(RavnestError):
    """The program cannot be cut there."""


class ProgramError(RavnestError):
    """A stage file was refused: it is malformed, not allowed or too big."""


class WeightsError(RavnestError):
    """A weights file was refused: it is malformed or does not fit the stage."""


class LinkError(RavnestError):
    """A link between two nodes failed."""


class FrameError(LinkError):
    """A message was refused: it is malformed, too big or not expected."""


class HandshakeError(LinkError):
    """No link was made: one side does not trust the other."""


class LinkClosed(LinkError):
    """One side closed the link or died."""


class LinkTimeout(LinkError):
    """A deadline passed."""


class IdentityError(RavnestError):
    """A key, certificate or signing request cannot be used."""


class PlanError(RavnestError):
    """There is no plan; the message says what would make one possible."""


class WorkerLost(RavnestError):
    """A worker process ended before its work did."""


class NotFinite(RavnestError):
    """The loss became infinite or not a number."""
