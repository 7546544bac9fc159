"""What a node and its coordinator say to each other, as frozen tagged structs: MessagePack over one WebSocket.

A node says `Hello` first and hears `Welcome` or `Goodbye`. Then the coordinator says what the node should be
(`Desired`), and the node converges to it and reports. Nothing here is a command that could be lost: whoever
reconnects says `Hello` again and is told all of it again. `Tell` and `Report` are about the part of one generation; of
any other they are dropped.
"""

from __future__ import annotations

import msgspec

from .config import require
from .ids import check_id
from .orders import Order, Reports
from .peers import Peer, Whereabouts

__all__ = [
    "Beat", "Blob", "Copied", "Copy", "Desired", "Give", "Goodbye", "Hello", "Keep", "Leave", "LetGo", "Moved",
    "NodeProfile", "Part", "Peer", "Report", "Said", "Source", "Tell", "Told", "Welcome", "Whereabouts",
    "MAX_MESSAGE_BYTES", "MOST_COPIES",
]  # fmt: skip

MAX_MESSAGE_BYTES = 256 * 1024
MOST_COPIES = 4  # that a node keeps: its own, those it keeps for others, and what a plan may still need

_MOST_BYTES, _MOST_RATE, _MOST_GFLOPS, _MOST_S = 1 << 46, 1e12, 1e8, 60.0


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A strict record."""


class _Message(_Record, frozen=True, tag=True):
    """A strict record with its name in it."""


class NodeProfile(_Record, frozen=True, kw_only=True):
    """What a PC lends, measured by itself; limits are what a PC could have, beyond them is a slip or a lie."""

    memory_bytes: int
    gflops: float
    threads: int = 1
    device: str = "cpu"
    up_bytes_per_s: float = 2.5e6
    down_bytes_per_s: float = 12.5e6
    latency_s: float = 0.01  # to the coordinator, one way

    def __post_init__(self) -> None:
        require(0 < self.memory_bytes <= _MOST_BYTES, f"a node with {self.memory_bytes} bytes of memory is none")
        require(0 < self.gflops <= _MOST_GFLOPS, f"a node with {self.gflops} GFLOP/s is none")
        require(1 <= self.threads <= 4096, f"a node with {self.threads} threads is none")
        require(0 < self.up_bytes_per_s <= _MOST_RATE, f"a line of {self.up_bytes_per_s} bytes/s up is none")
        require(0 < self.down_bytes_per_s <= _MOST_RATE, f"a line of {self.down_bytes_per_s} bytes/s down is none")
        require(0 <= self.latency_s <= _MOST_S, f"a latency of {self.latency_s} s is none")
        require(len(self.device) <= 32, "the name of a device has at most 32 letters")


class Blob(_Record, frozen=True):
    """A file to fetch from the coordinator: `GET /v1/blobs/DIGEST`. The digest is its SHA-256, in hexadecimal."""

    digest: str
    num_bytes: int


class Copy(_Record, frozen=True):
    """What a stage of a cluster had learnt after so many updates, kept by somebody: weights and optimizer state."""

    cluster: str
    stage: int
    updates: int

    def __post_init__(self) -> None:
        check_id(self.cluster)
        require(self.stage >= 0 and self.updates >= 0, f"a copy of stage {self.stage} at {self.updates} is none")


class Source(_Record, frozen=True, kw_only=True):
    """A copy to begin from. `giver` None: it is on this node; else it is passed on, and `transfer` is its number."""

    copy: Copy
    giver: Peer | None = None
    transfer: int = 0


class Part(_Record, frozen=True, kw_only=True):
    """What a node should be: this stage of this cluster. `generation` is the one in which the cluster was formed.

    `file` is the stage (`graph.load`), `brief` how to train it (an encoded `node.orders.Assign`), `weights` what it
    starts with (None: made from the seed). The stage before the first is the coordinator's feed (`before` None).

    A cluster that goes on from what others had learnt begins after `begin` updates, with the tensors of `sources`
    (the first that has one counts) and of the `states` files, in this order.
    """

    generation: int
    cluster: str
    stage: int
    count: int
    file: Blob
    brief: Blob
    weights: Blob | None = None
    before: Peer | None = None
    after: Peer | None = None
    begin: int = 0
    sources: tuple[Source, ...] = ()
    states: tuple[Blob, ...] = ()


# What a node says.


class Hello(_Message, frozen=True, kw_only=True):
    """I am here (my certificate says who), this is what I lend and where my door is; `holding` is of my part, or 0.

    `copies` are those that I keep, `done` the updates that my part has made.
    """

    release: str
    profile: NodeProfile
    where: Whereabouts
    holding: int = 0
    done: int = 0
    copies: tuple[Copy, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.copies) <= MOST_COPIES, f"a node keeps at most {MOST_COPIES} copies, not {len(self.copies)}")


class Moved(_Message, frozen=True):
    """My door is elsewhere now."""

    where: Whereabouts


class Beat(_Message, frozen=True):
    """I am still here, doing this."""

    doing: str = ""


class Report(_Message, frozen=True):
    """My part of this generation did this."""

    generation: int
    report: Reports


class LetGo(_Message, frozen=True):
    """Nothing is left of my part of this generation, but perhaps a copy of what it had learnt."""

    generation: int
    copy: Copy | None = None


class Copied(_Message, frozen=True):
    """The copy that was to be kept by this transfer is here; or (`reason`) it is not."""

    transfer: int
    copy: Copy | None = None
    num_bytes: int = 0
    reason: str = ""


class Leave(_Message, frozen=True):
    """I leave for good, in good order."""

    reason: str = ""


# What a coordinator says.


class Welcome(_Message, frozen=True, kw_only=True):
    """You are in. Say a `Beat` every `beat_s`; who is not heard for three of them is lost."""

    run: str
    beat_s: float


class Desired(_Message, frozen=True):
    """Be this, or (None) be free; and why."""

    part: Part | None
    reason: str


class Tell(_Message, frozen=True):
    """An order for the part of this generation."""

    generation: int
    order: Order


class Give(_Message, frozen=True):
    """Pass your copy of this stage on: of your part as it is now, if you are that stage, else of what you keep."""

    transfer: int
    copy: Copy
    taker: Peer


class Keep(_Message, frozen=True):
    """Get a copy from this node, and keep it; what you have of an older one goes."""

    transfer: int
    copy: Copy
    giver: Peer


class Goodbye(_Message, frozen=True):
    """Go, because ...; come back only if `again`."""

    reason: str
    again: bool = True


Said = Hello | Moved | Beat | Report | LetGo | Copied | Leave
Told = Welcome | Desired | Tell | Give | Keep | Goodbye
