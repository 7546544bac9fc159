"""The agent of a node: a small process that joins a run, keeps a worker, and makes of it what the coordinator wants.

    ticket -> identity -> profile -> worker with an open door -> Hello -> Desired, Desired, ...

The conversation with the coordinator may break at any moment and is begun again for ever; the worker and its links
live on meanwhile. The worker may die at any moment and is started again. The agent itself never imports torch.
"""

from __future__ import annotations

import asyncio
from collections import deque

from ..core.config import config, require
from ..core.control import (
    Copied,
    Desired,
    Give,
    Hello,
    Keep,
    Leave,
    LetGo,
    Moved,
    NodeProfile,
    Report,
    Tell,
    Told,
    Welcome,
)
from ..core.errors import LinkError, RavnestError
from ..core.orders import Ready
from ..net.addresses import Address, show
from ..net.identity import Identity
from ..net.ticket import Ticket
from .backoff import Backoff
from .client import Client, Refused, member_context
from .convergence import Convergence
from .enrol import Applicant, NotTheCoordinator, enrol, known_identity
from .home import Home
from .keeper import Keeper
from .line import with_line
from .measure import measure_pc
from .say import Speaker, joined
from .session import Outbox, SentAway, converse
from .talk import Begin, Freed, Opened, Unable

__all__ = ["Agent", "AgentConfig"]

_LEAVE_S = 70.0  # a second Ctrl-C does not wait for it
_SEEN_S = 3.0
_NOT_A_MEMBER = (401, 403)


@config
class AgentConfig:
    """Whose run to join, as whom, and what its owner lends."""

    ticket: Ticket
    name: str
    release: str
    home: Home
    port: int = 0
    memory_bytes: int | None = None
    threads: int | None = None
    max_upload_bytes_per_s: float | None = None
    profile: NodeProfile | None = None  # None: this PC is measured first

    def __post_init__(self) -> None:
        require(0 <= self.port < 2**16, f"{self.port} is not a port: it is 1 to 65535, or 0 for any")


class Agent:
    """Make it in a running asyncio loop; `run` it, and ask it to `leave`."""

    def __init__(self, config: AgentConfig, speaker: Speaker) -> None:
        self._config, self._speaker = config, speaker
        self._addresses: deque[Address] = deque(config.ticket.addresses)  # the one that answered last is first
        self._outbox = Outbox()
        self._keeper = Keeper(config.home.log, self._heard, self._lost_worker)
        self._convergence = Convergence(
            config.home, self._connect, self._keeper.tell, self._report, self._keeper.is_ready
        )
        self._leaving = asyncio.Event()
        self._unable: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._name = config.name
        self._profile: NodeProfile | None = None
        self._is_line_measured = False
        self._is_welcome = False

    async def run(self) -> None:
        """Until it is asked to leave; raises `SentAway` when the coordinator wants no more of it."""
        with self._config.home.held():
            work = asyncio.create_task(self._work())
            leaving = asyncio.create_task(self._leaving.wait())
            try:
                done, _ = await asyncio.wait((work, leaving, self._unable), return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
                if self._is_welcome and self._leaving.is_set():
                    self._outbox.put(Leave("its owner ended it"))
                    await asyncio.wait((work,), timeout=_LEAVE_S)  # which ends when the coordinator says goodbye
            finally:
                work.cancel()
                leaving.cancel()
                await asyncio.gather(work, leaving, return_exceptions=True)
                await self._convergence.close()
                await self._keeper.end()

    def leave(self) -> None:
        """In good order."""
        passes_on = ", when others have taken over what this PC has learnt; Ctrl-C again to leave at once"
        self._speaker.say(f"leaving{passes_on if self._convergence.holding else ''}")
        self._leaving.set()

    def kill(self) -> None:
        """At once: nothing is left but what the next start clears away."""
        self._keeper.kill()

    async def _work(self) -> None:
        config = self._config
        identity = await self._enrol()
        self._name, self._context = identity.name, member_context(identity)
        self._speaker.say("measuring this PC")
        measured = config.profile or await measure_pc(config.memory_bytes, config.threads)
        self._profile, self._convergence.max_weights_bytes = measured, measured.memory_bytes
        begin = Begin(
            identity=str(identity.directory), coordinator=self._addresses[0], profile=measured,
            port=config.port or config.home.port, is_port_asked=config.port != 0,
            max_upload_bytes_per_s=config.max_upload_bytes_per_s, shelf=str(config.home.shelf.directory),
        )  # fmt: skip
        self._keeper.start(begin)
        await self._keeper.is_ready.wait()
        await self._converse_for_ever()

    async def _enrol(self) -> Identity:
        config = self._config
        known = known_identity(config.ticket, config.home.directory)
        if known is not None:
            return known
        applicant = Applicant(
            ticket=config.ticket, name=config.name, release=config.release, directory=config.home.directory
        )
        backoff = Backoff()
        while True:
            errors: list[RavnestError] = []
            for _ in range(len(self._addresses)):
                self._speaker.say(f"joining {show(self._addresses[0])}")
                try:
                    return await enrol(applicant, self._addresses[0])
                except (LinkError, NotTheCoordinator) as error:
                    errors.append(error)
                self._addresses.rotate(-1)
            if all(isinstance(error, NotTheCoordinator) for error in errors):
                raise errors[0]
            await self._wait(backoff, str(errors[0]))

    async def _converse_for_ever(self) -> None:
        backoff, failures = Backoff(), 0
        while (problem := await self._try_conversing()) is not None:
            if self._is_welcome:  # it worked: this is a first failure
                self._is_welcome, failures = False, 0
                backoff.reset()
            else:
                self._addresses.rotate(-1)
                failures += 1
            if failures % len(self._addresses) == 0:  # all of them have been tried
                await self._wait(backoff, problem)

    async def _try_conversing(self) -> str | None:
        """Why the conversation ended, if it may be begun again; None when all is said."""
        try:
            async with self._connect() as client:
                await self._converse(client)
            return None
        except SentAway as away:
            if self._leaving.is_set():
                return None
            if not away.again:
                raise
            return f"the coordinator sends this node away: {away}"
        except Refused as refused:
            if refused.status in _NOT_A_MEMBER:
                raise SentAway(f"this node is no member of the run any more: {refused}", again=False) from refused
            return str(refused)
        except LinkError as error:
            return None if self._leaving.is_set() else str(error)

    async def _converse(self, client: Client) -> None:
        keeper = self._keeper
        assert self._profile is not None, "this PC was measured before"
        if not self._is_line_measured:
            self._speaker.say("measuring the line to the coordinator")
            line = with_line(self._profile, client, self._config.max_upload_bytes_per_s)
            found, _ = await asyncio.gather(line, keeper.wait_seen(_SEEN_S))
            self._profile, self._is_line_measured = found, True
        hello = Hello(
            release=self._config.release, profile=self._profile, where=keeper.where,
            holding=self._convergence.holding, copies=self._config.home.shelf.copies(),
        )  # fmt: skip
        await converse(client, hello, self._outbox, self._told, lambda: self._speaker.doing)

    def _told(self, told: Told) -> None:
        match told:
            case Welcome(run=run):
                self._config.home.belong(run)
                assert self._profile is not None, "who is welcome has said hello"
                self._is_welcome = True
                self._speaker.say(joined(self._name, self._profile))
            case Desired(part=part, reason=reason):
                if self._convergence.desire(part):
                    self._speaker.desired(part, reason)
            case Tell(generation=generation, order=order):
                self._convergence.order(generation, order)
            case Give() | Keep():
                self._keeper.tell(told)

    def _heard(self, said: Opened | Moved | Report | Freed | Copied | Unable) -> None:
        match said:
            case Opened(port=port):
                self._config.home.port = port
            case Moved():
                if self._is_welcome:  # else a hello says it
                    self._outbox.put(said)
            case Report():
                self._convergence.reported(said)
            case Freed(generation=generation, copy=copy):
                self._convergence.freed(generation, copy)
            case Copied():
                self._outbox.put(said)
            case Unable(reason=reason):
                if not self._unable.done():
                    self._unable.set_exception(RavnestError(reason))

    def _lost_worker(self, reason: str, wait_s: float) -> None:
        self._convergence.worker_lost(reason)
        self._speaker.say(f"{reason}: starting another in {wait_s:.1f} s. Its log: {self._config.home.log}")

    def _report(self, report: Report | LetGo) -> None:
        if isinstance(report, Report):
            if isinstance(report.report, Ready):
                self._keeper.is_well()
            self._speaker.reported(report)
        self._outbox.put(report)

    def _connect(self) -> Client:
        return Client(self._addresses[0], self._context)

    async def _wait(self, backoff: Backoff, why: str) -> None:
        goes_on = "; training goes on" if self._convergence.holding else ""
        self._speaker.say(f"{why}: trying again, ever more slowly{goes_on}")
        await asyncio.sleep(backoff.next_s())
