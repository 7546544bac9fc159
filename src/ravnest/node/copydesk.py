"""Copies come and go: this node gives what it has to others, gets what its next part begins from, and keeps copies.

The copy of a part that runs is made in a pause between two of its actions; of any other it is on the shelf. Each
transfer has a number, which both ends were told, and a link of its own; it is over within its deadlines, whatever
happens at the other end, and never touches a part that runs but for that pause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Protocol

from ..core.control import Copied, Copy, Give, Keep, Peer, Source
from ..core.errors import LinkClosed, LinkError, RavnestError
from ..graph import Stage
from ..graph.program import DTYPES
from ..net.addresses import Address
from ..net.link import LinkConfig
from ..net.stream import StreamLink
from ..runtime.state import owned
from ..runtime.statefile import select
from .lent import Lent
from .passing import MESSAGES, NotGiven, give, receive

__all__ = ["CopyDesk", "Live"]

_AT_ONCE = 8
_REACH_S = 120.0
_KEPT_PER_PARAMETER = 6  # bytes of a copy for each byte of what a stage owns, at the most
_HEADER_BYTES = 1 << 20


class Live(Protocol):
    """A part that runs."""

    def copy_to(self, path: Path) -> int:
        """Write what it has learnt in its next pause; after how many updates."""

    def wait(self, timeout_s: float, /) -> bool:
        """Until its own messages are sent, but not for long."""


class CopyDesk:
    """`live(cluster, stage)` is the part that runs, if it is that; `say` tells the agent."""

    def __init__(
        self,
        lent: Lent,
        coordinator: Address,
        live: Callable[[str, int], Live | None],
        say: Callable[[Copied], None],
    ) -> None:
        self._lent, self._coordinator, self._live, self._say = lent, coordinator, live, say
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="copies")
        self._lock = threading.Lock()  # around the next
        self._is_closed = False

    def order(self, order: Give | Keep) -> None:
        """Have it done in the background."""
        with self._lock:
            if not self._is_closed:
                self._pool.submit(self._give if isinstance(order, Give) else self._keep, order)  # type: ignore[arg-type]

    def close(self) -> None:
        """Nothing more is begun; what is under way ends with the process."""
        with self._lock:
            self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def gather(self, stage: Stage, sources: tuple[Source, ...], directory: Path) -> list[Path]:
        """The files that a part begins from, in the order of its sources; raises `LinkClosed` if one cannot be had."""
        names = tuple(owned(stage))
        most = _KEPT_PER_PARAMETER * _owned_bytes(stage) + _HEADER_BYTES

        def get(number: int, source: Source) -> Path:
            if source.giver is None:
                return self._own(source.copy)
            path = directory / f"source-{number}"
            try:
                self._fetch(source.giver, source.transfer, names, path, most)
            except (LinkError, NotGiven) as error:  # not this node's fault
                raise LinkClosed(f"what {source.giver.name} had learnt cannot be had: {error}") from error
            return path

        if not sources or not names:  # a stage without parameters has nothing to begin from
            return []
        with ThreadPoolExecutor(len(sources), thread_name_prefix="sources") as pool:  # those who give do not wait long
            return [path.result() for path in [pool.submit(get, i, source) for i, source in enumerate(sources)]]

    def _own(self, copy: Copy) -> Path:
        path = self._lent.shelf.path(copy)
        newest = self._lent.shelf.find(copy.cluster, copy.stage)
        if path.exists() or newest is None:
            return path
        return self._lent.shelf.path(newest)

    def _fetch(self, giver: Peer, transfer: int, names: tuple[str, ...], path: Path, max_bytes: int) -> int:
        what = _purpose(transfer)
        self._lent.expect(what, [giver.name])
        try:
            with self._link(giver, transfer) as link:
                return receive(link, names, path, max_bytes=max_bytes)
        finally:
            self._lent.expect(what, [])

    def _link(self, peer: Peer, transfer: int) -> StreamLink:
        config = LinkConfig(headers=MESSAGES, generation=transfer, max_frame_bytes=2**20)
        reached = self._lent.reach(peer, _purpose(transfer), config, coordinator=self._coordinator, deadline_s=_REACH_S)
        return reached.link

    def _keep(self, order: Keep) -> None:
        shelf, copy = self._lent.shelf, order.copy
        try:
            with shelf.writing() as path:
                updates = self._fetch(order.giver, order.transfer, (), path, self._lent.memory_bytes)
                kept, num_bytes = Copy(copy.cluster, copy.stage, updates), path.stat().st_size
                shelf.put(path, kept)
        except (RavnestError, OSError) as error:
            self._say(Copied(order.transfer, reason=str(error)[:500] or type(error).__name__))
            return
        self._say(Copied(order.transfer, kept, num_bytes))

    def _give(self, order: Give) -> None:
        what, live = _purpose(order.transfer), self._live(order.copy.cluster, order.copy.stage)
        self._lent.expect(what, [order.taker.name])
        try:
            with self._link(order.taker, order.transfer) as link, self._lent.shelf.writing() as draft:
                give(
                    link,
                    lambda names: self._prepare(order.copy, names, draft),
                    turn=None if live is None else live.wait,
                    pace=self._lent.pace,
                )
        except (RavnestError, OSError) as error:  # the taker says so too
            self._say(Copied(order.transfer, reason=str(error)[:500] or type(error).__name__))
        finally:
            self._lent.expect(what, [])

    def _prepare(self, copy: Copy, names: tuple[str, ...], draft: Path) -> tuple[Path, int]:
        """The copy, or what of it is wanted, as a file that is there until it has been sent."""
        whole, updates = self._whole(copy, draft)
        if not names:
            return whole, updates
        select(whole, draft, names)
        return draft, updates

    def _whole(self, copy: Copy, draft: Path) -> tuple[Path, int]:
        """Of the part that runs; if it does not, or ends just now, of what is on the shelf."""
        problem = "it is not here"
        live = self._live(copy.cluster, copy.stage)
        if live is not None:
            try:
                return draft, live.copy_to(draft)
            except RavnestError as error:
                problem = str(error)
        kept = self._lent.shelf.find(copy.cluster, copy.stage)
        if kept is None:
            raise RavnestError(f"there is no copy of stage {copy.stage} of {copy.cluster}: {problem}")
        return self._lent.shelf.path(kept), kept.updates


def _purpose(transfer: int) -> str:
    return f"copy {transfer}"


def _owned_bytes(stage: Stage) -> int:
    return sum(prod(item.shape) * DTYPES[item.dtype].itemsize for item in owned(stage).values())
