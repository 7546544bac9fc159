"""What an agent and its worker process say to each other: frozen tagged structs over a socket pair.

The agent says `Begin` first. The worker opens its door (`Opened`) and says where that is seen (`control.Moved`). Then
it takes parts and gives them back, one at a time: `Take`, orders for it (`control.Tell`), `Report`s of it, and `Freed`
when nothing of it is left, whatever the reason.
"""

from __future__ import annotations

import msgspec

from ..core.control import Copied, Copy, Give, Keep, Moved, NodeProfile, Part, Report, Tell
from ..core.orders import Stop

__all__ = ["Begin", "Free", "Freed", "FromAgent", "FromWorker", "Opened", "Take", "Unable"]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """A strict record with its name in it."""


class Begin(_Message, frozen=True, kw_only=True):
    """This is who you are (the directory of your identity), what you have, and where the coordinator is."""

    identity: str
    coordinator: tuple[str, int]
    profile: NodeProfile
    shelf: str  # the directory of the copies that are kept
    port: int = 0
    is_port_asked: bool = False  # by the owner; else another one is as good when it is taken
    max_upload_bytes_per_s: float | None = None


class Take(_Message, frozen=True, kw_only=True):
    """Be this part; its files are here."""

    part: Part
    coordinator: tuple[str, int]
    file: str
    brief: str
    weights: str = ""
    states: tuple[str, ...] = ()


class Free(_Message, frozen=True):
    """Be free, if you hold the part of this generation."""

    generation: int


class Opened(_Message, frozen=True):
    """The door is open at this port."""

    port: int


class Freed(_Message, frozen=True):
    """Nothing is left of the part of this generation, but perhaps a copy on the shelf."""

    generation: int
    copy: Copy | None = None


class Unable(_Message, frozen=True):
    """This machine, or what its owner asked for, cannot work: trying again would change nothing."""

    reason: str


FromAgent = Begin | Take | Free | Tell | Give | Keep | Stop
FromWorker = Opened | Moved | Report | Freed | Copied | Unable
