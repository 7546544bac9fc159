"""Errors raised by Ravnest.

    RavnestError
    ├── TraceError            the model cannot be turned into a program
    │   ├── UnsupportedOp         it calls an operation outside the allow-list
    │   └── FixedBatchSize        it works with one batch size only
    ├── CutError              the program cannot be cut at that index
    ├── ProgramError          a stage file is malformed, not allowed or too big
    ├── WeightsError          a weights file is malformed or does not match the stage
    ├── LinkError             a link between two nodes failed
    │   ├── FrameError            a message is malformed, too big or unexpected
    │   ├── HandshakeError        one side does not trust the other
    │   ├── LinkClosed            one side closed the link or died
    │   └── LinkTimeout           a deadline passed
    ├── RequestRejected       the coordinator rejected a request of this node
    ├── IdentityError         a key, certificate or signing request cannot be used
    ├── PlanError             no plan is possible (`ravnest.planner`: TooManyNodes, DoesNotFit)
    ├── RingFailed            an averaging ring did not complete
    │   └── BadContribution       a member's values are infinite or NaN
    ├── WorkerLost            a worker process ended before its work did
    └── NotFinite             the loss became infinite or NaN

They are caused by the environment, and their messages say what to do. A mistake in a call is a `ValueError`; a bug in
Ravnest is an `AssertionError`.
"""

from __future__ import annotations

__all__ = [
    "BadContribution",
    "CutError",
    "FixedBatchSize",
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
    "RingFailed",
    "TraceError",
    "UnsupportedOp",
    "WeightsError",
    "WorkerLost",
]


class RavnestError(Exception):
    """Base class of all errors that the environment can cause."""


class TraceError(RavnestError):
    """The model and its loss cannot be turned into a program."""


class FixedBatchSize(TraceError):
    """The model works with the batch size of the example only."""


class UnsupportedOp(TraceError):
    """The model calls an operation outside the allow-list."""


class CutError(RavnestError):
    """The program cannot be cut at that index."""


class ProgramError(RavnestError):
    """A stage file was rejected: it is malformed, not allowed or too big."""


class WeightsError(RavnestError):
    """A weights file was rejected: it is malformed or does not match the stage."""


class LinkError(RavnestError):
    """A link between two nodes failed."""


class FrameError(LinkError):
    """A message was rejected: it is malformed, too big or unexpected."""


class HandshakeError(LinkError):
    """No link was established: one side does not trust the other."""


class LinkClosed(LinkError):
    """One side closed the link or died."""


class LinkTimeout(LinkError):
    """A deadline passed."""


class IdentityError(RavnestError):
    """A key, certificate or signing request cannot be used."""


class PlanError(RavnestError):
    """No plan is possible; the message says what would make one possible."""


class RequestRejected(RavnestError):
    """A server rejected a request; `status` is the HTTP status."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class RingFailed(RavnestError):
    """Averaging ring `ring` failed at `member`, as far as this node knows."""

    def __init__(self, ring: int, member: str, why: str) -> None:
        super().__init__(f"ring {ring} failed: {why}")
        self.ring, self.member, self.why = ring, member, why


class BadContribution(RingFailed):
    """A member's values cannot be averaged; none of them were passed on."""


class WorkerLost(RavnestError):
    """A worker process ended before its work did."""


class NotFinite(RavnestError):
    """The loss became infinite or NaN."""
