"""Carries out what `sources` and `copying` decide: who gives a copy to whom, and what came of it.

Both ends of a transfer are told its number and a token for the relay. One that is for a new part is over when that part
is ready or has failed, which its cluster tells; one that is only to be kept is told here.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.control import Copied, Copy, Give, Keep, Peer, Source, Told
from ..core.errors import FrameError
from ..net.hub import RelayHub
from .copying import CopyWishes, decide_copies
from .events import CopyKept, Event
from .sources import Beginning, Found
from .state import State

__all__ = ["Copies"]

_PATIENCE_S = 900.0
_MOST = 2**31


@dataclass(frozen=True)
class _Transfer:
    giver: str
    taker: str
    copy: Copy
    token: str
    began_s: float
    is_kept: bool


class _Office(Protocol):
    """What of the coordinator is needed here."""

    state: State
    hub: RelayHub

    def now_s(self) -> float: ...

    def record(self, event: Event) -> None: ...

    def note(self, text: str) -> None: ...

    def tell(self, name: str, told: Told) -> None: ...


class Copies:
    """Lives in the coordinator's loop."""

    def __init__(self, office: _Office, wishes: CopyWishes) -> None:
        self._office, self.wishes = office, wishes
        self._transfers: dict[int, _Transfer] = {}

    def look(self) -> None:
        """Decide and act."""
        office = self._office
        now_s = office.now_s()
        for number, transfer in list(self._transfers.items()):
            if now_s >= transfer.began_s + _PATIENCE_S or not self._is_there(transfer):
                self._end(number)
        busy = {name for t in self._transfers.values() if t.is_kept for name in (t.giver, t.taker)}
        for wanted in decide_copies(office.state, now_s, self.wishes, busy):
            copy = Copy(wanted.cluster, wanted.stage, 0)
            number, transfer = self._begin(wanted.giver, wanted.taker, copy, is_kept=True)
            self._give(number, transfer)
            office.tell(wanted.taker, Keep(number, copy, self._peer(wanted.giver, transfer.token)))

    def sources(self, members: Sequence[str], beginning: Beginning) -> list[tuple[Source, ...]]:
        """What each member of a new cluster begins from; those who give are told to."""
        return [
            tuple(self._source(name, found) for found in stage)
            for name, stage in zip(members, beginning.stages, strict=True)
        ]

    def _source(self, name: str, found: Found) -> Source:
        if found.holder == name:
            return Source(copy=found.copy)
        number, transfer = self._begin(found.holder, name, found.copy, is_kept=False)
        self._give(number, transfer)
        return Source(copy=found.copy, giver=self._peer(found.holder, transfer.token), transfer=number)

    def reported(self, name: str, said: Copied) -> None:
        """What a node says of a transfer: the one who got a copy to keep, or either if it failed."""
        transfer = self._transfers.get(said.transfer)
        if transfer is None:
            return
        if name not in (transfer.giver, transfer.taker):
            raise FrameError("it speaks of a copy that is not its own")
        if said.copy is not None:
            got, wanted = said.copy, transfer.copy
            is_same = (got.cluster, got.stage) == (wanted.cluster, wanted.stage)
            if not transfer.is_kept or name != transfer.taker or not is_same:
                raise FrameError("it has a copy that it was not to get")
            now_s = self._office.now_s()
            self._office.record(
                CopyKept(now_s, name, transfer.giver, got, max(said.num_bytes, 0), now_s - transfer.began_s)
            )
        elif transfer.is_kept:
            self._office.note(f"{transfer.taker} got no copy from {transfer.giver}: {said.reason[:300]}")
        self._end(said.transfer)

    def _begin(self, giver: str, taker: str, copy: Copy, *, is_kept: bool) -> tuple[int, _Transfer]:
        number, token = secrets.randbelow(_MOST - 1) + 1, secrets.token_urlsafe(24)
        transfer = _Transfer(giver, taker, copy, token, self._office.now_s(), is_kept)
        self._office.hub.open(token, (giver, taker))
        self._transfers[number] = transfer
        return number, transfer

    def _give(self, number: int, transfer: _Transfer) -> None:
        self._office.tell(transfer.giver, Give(number, transfer.copy, self._peer(transfer.taker, transfer.token)))

    def _end(self, number: int) -> None:
        self._office.hub.close(self._transfers.pop(number).token)

    def _peer(self, name: str, token: str) -> Peer:
        return Peer(name=name, where=self._office.state.nodes[name].where, relay_token=token)

    def _is_there(self, transfer: _Transfer) -> bool:
        state = self._office.state
        return all(state.nodes[name].is_present for name in (transfer.giver, transfer.taker))
