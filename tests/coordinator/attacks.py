"""A coordinator to attack, with honest nodes at work on it, and the connections that attackers make.

All in one asyncio loop, over real sockets. `Giver` stands for whoever wants a model trained: its plans are clusters of
`size` nodes by name, and it gives as many batches as it is told to, so that what is settled can be counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ravnest.coordinator.clusters import LiveCluster
from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.decide import Wishes
from ravnest.coordinator.events import Cluster, Idle
from ravnest.coordinator.patience import Patience
from ravnest.coordinator.requester import Piece, Planned, RingShape, StageFiles
from ravnest.coordinator.service import Service, ServiceConfig
from ravnest.core.control import NodeProfile
from ravnest.core.errors import PlanError
from ravnest.core.orders import Reports
from ravnest.net.addresses import Address
from ravnest.net.front import FrontConfig
from ravnest.net.identity import Identity, make_authority, make_key, make_request, save_identity
from ravnest.plan.fleet import Machine
from tests.coordinator.guests import PATIENCE_S, Guest, enrolled

QUICK = Wishes(wait_s=0.05, beat_s=1.0, forming_s=5.0, blame_s=60.0)
PATIENT = Patience(goodbye_s=0.4, tell_s=0.05)
SHORT = Patience(request_s=1.0, hello_s=1.0, body_s=1.0, send_s=1.0, goodbye_s=0.4, tell_s=0.05)  # to see it end
FRONT = FrontConfig(handshake_s=1.0, first_word_s=1.0)


class Giver:
    """A requester without a model: stage files are noise, batches a few bytes."""

    def __init__(self, directory: Path, size: int = 2) -> None:
        self.directory, self.size = directory, size
        self.given = 0
        self.done: list[int] = []
        self.reports: list[tuple[str, int, Reports]] = []
        self.file = b"a stage"
        self.max_bytes = 1000

    def plan(self, machines: Sequence[Machine], generation: int, broken: Sequence[str] = ()) -> Planned:
        names = [machine.name for machine in machines]
        if len(names) < self.size:
            raise PlanError(f"{len(names)} nodes are fewer than {self.size}")
        whole = len(names) // self.size * self.size
        groups = [tuple(names[start : start + self.size]) for start in range(0, whole, self.size)]
        clusters = tuple(
            Cluster(
                id=f"c{generation}-{i}", generation=generation, members=members, cuts=(1,) * (self.size - 1),
                accumulate=2, depths=(2,) * self.size, samples_per_s=10.0, reason="they are next to each other by name",
            )
            for i, members in enumerate(groups)
        )  # fmt: skip
        return Planned(clusters, spares=tuple(Idle(name, "one too many") for name in names[whole:]))

    def better(self, machines: Sequence[Machine], running: Sequence[str]) -> tuple[tuple[str, ...], str]:
        return (), "nothing is better"

    def stages(
        self, cluster: Cluster, profiles: Sequence[NodeProfile], lacking: Sequence[int] = ()
    ) -> list[StageFiles]:
        return [StageFiles(self.file, b"a brief", max_bytes=self.max_bytes) for _ in cluster.members]

    def rings(self, clusters: Sequence[Cluster]) -> list[RingShape]:
        return []

    def available(self) -> int:
        return self.given

    def pieces(self, batch: int, count: int) -> list[Piece]:
        return [Piece(1, 1 / count, [bytes(8)]) for _ in range(count)]

    def fed(self, cluster: str, window: int, batch: int, pieces: Sequence[Piece]) -> None:
        """Nothing to remember."""

    def settled(self, batch: int) -> None:
        self.done.append(batch)

    def reported(self, cluster: str, stage: int, report: Reports) -> None:
        self.reports.append((cluster, stage, report))

    def ended(self, cluster: str, reason: str, *, is_lost: bool) -> None:
        """Nothing to forget."""

    def learnt(self) -> int:
        return 0

    def state_path(self, cluster: str, stage: int, updates: int) -> Path | None:
        return None

    def weights_path(self, cluster: str, stage: int) -> Path:
        return self.directory / f"{cluster}-{stage}"


class House:
    """A coordinator that listens, and all one needs to watch it."""

    def __init__(self, config: ServiceConfig, giver: Giver, directory: Path) -> None:
        self.giver, self.directory = giver, directory
        self.guests: dict[str, Guest] = {}
        self._happened = asyncio.Event()
        self.service = Service(config, giver, run="test", release="test", on_event=lambda event: self._happened.set())

    @property
    def address(self) -> Address:
        return "127.0.0.1", self.service.port

    @property
    def coordinator(self) -> Coordinator:
        return self.service.coordinator

    @property
    def ticket(self) -> str:
        return self.service.ticket()

    @property
    def words(self) -> list[str]:
        """All that was said of what happened."""
        return [text for _, text in self.coordinator.state.words]

    @property
    def settled(self) -> int:
        return self.coordinator.state.leases.counts.settled

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Look again and again, with a deadline."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not holds():
                    self._happened.clear()
                    with contextlib.suppress(TimeoutError):  # not all that one waits for is an event
                        async with asyncio.timeout(0.02):
                            await self._happened.wait()
        except TimeoutError:
            raise AssertionError("\n".join([f"it never came to this: {what}", *self.words])) from None

    async def says(self, *parts: str) -> None:
        """Until one sentence of the log has all of these in it."""
        await self.until(lambda: any(all(part in said for part in parts) for said in self.words), f"says {parts}")

    async def trains(self, batches: int = 5) -> None:
        """So many batches more are given, and settled, each once."""
        self.giver.given += batches
        self.coordinator.running.more()
        await self.until(lambda: self.settled == self.giver.given, f"{self.giver.given} batches are settled")
        assert sorted(self.giver.done) == list(range(self.giver.given))
        assert self.coordinator.state.leases.counts.is_balanced

    async def enrol(self, name: str) -> Identity:
        return await enrolled(self.ticket, name, self.directory / "nodes")

    async def phase(self, cluster: str, phase: str) -> None:
        """Until the cluster is that far."""
        clusters = self.coordinator.state.clusters
        await self.until(lambda: cluster in clusters and clusters[cluster].phase == phase, f"{cluster} is {phase}")

    def cluster_of(self, name: str) -> LiveCluster:
        found = self.coordinator.running.of(name)
        assert found is not None, f"{name} is in no cluster"
        return found

    async def guest(self, name: str, **given: Any) -> Guest:
        """A node that is not there yet: enter it."""
        return Guest(await self.enrol(name), self.address, **given)


@contextlib.asynccontextmanager
async def house(directory: Path, *, size: int = 2, **changes: Any) -> AsyncIterator[House]:
    """A coordinator that is quick to plan and to tell; `changes` are of its `ServiceConfig`."""
    given = {"wishes": QUICK, "patience": PATIENT, **changes}
    config = ServiceConfig(directory=directory / "coordinator", host="127.0.0.1", port=0, **given)
    found = House(config, Giver(directory, size), directory)
    await found.service.open()
    try:
        yield found
    finally:
        await found.service.close("the test is over")


@contextlib.asynccontextmanager
async def at_work(directory: Path, names: Sequence[str] = ("ann", "bob"), **changes: Any) -> AsyncIterator[House]:
    """The same with honest nodes that train, before and after what happens inside."""
    async with house(directory, **changes) as found, contextlib.AsyncExitStack() as stack:
        for name in names:
            found.guests[name] = await stack.enter_async_context(await found.guest(name))
        await found.trains()
        yield found
        await found.trains()


def run(test: Coroutine[Any, Any, None]) -> None:
    """A test to its end; what the loop itself complains about is an error."""
    complaints: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(str(context)))
        await test

    asyncio.run(watched())
    assert not complaints


def stranger(directory: Path, name: str = "ann", trusts: bytes | None = None) -> Identity:
    """A certificate in a member's name, of another authority; `trusts` is the authority it knows."""
    authority = make_authority("somebody else", now=datetime.now(UTC), valid=timedelta(days=30))
    key = make_key()
    certificate = authority.sign(make_request(key, name), name, now=datetime.now(UTC), valid=timedelta(days=30))
    return save_identity(directory, key, certificate, trusts or authority.certificate_pem)


def anonymous(protocol: str = "http/1.1") -> ssl.SSLContext:
    """TLS without a certificate, and without a question."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    return context


class Caller:
    """A connection on which anything may be said."""

    def __init__(self, address: Address, context: ssl.SSLContext | None = None) -> None:
        self._address, self._context = address, context

    async def __aenter__(self) -> Caller:
        self.reader, self.writer = await asyncio.open_connection(*self._address, ssl=self._context)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.writer.transport.abort()

    async def say(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def rest(self) -> bytes:
        """All that comes until the other side ends it, which it must."""
        heard = bytearray()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while data := await self.reader.read(1 << 16):
                    heard += data
        except TimeoutError:
            raise AssertionError(f"nobody ended this connection, on which was heard: {heard!r}") from None
        except OSError:  # which is one way to end it
            pass
        return bytes(heard)
