"""A worker of a fleet as its agent has it, and a coordinator that only feeds: real processes, real sockets."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from ravnest.core.control import Blob, NodeProfile, Part, Peer, Report, Whereabouts
from ravnest.core.errors import LinkError
from ravnest.core.messages import Backward, Data, Forward
from ravnest.core.orders import Reports, Stop
from ravnest.core.schedule import Rule
from ravnest.graph import Program, Stage, dump, split, trace
from ravnest.net.addresses import Address
from ravnest.net.agree import hear_introduction, introduce
from ravnest.net.converse import authenticate
from ravnest.net.deadline import Deadline
from ravnest.net.handshake import TlsChannel
from ravnest.net.hello import FEED_PROTOCOL
from ravnest.net.identity import Identity
from ravnest.net.link import LinkConfig
from ravnest.net.listen import finish
from ravnest.net.stream import StreamLink
from ravnest.net.tls import tls_context, tune
from ravnest.net.unix import unix_link
from ravnest.node.orders import Assign
from ravnest.node.talk import Begin, FromWorker, Take
from ravnest.runtime.corrections import none
from ravnest.runtime.freight import as_bytes
from ravnest.runtime.optimizers import SGD
from ravnest.runtime.roles import roles
from ravnest.runtime.settings import Settings

T = TypeVar("T")

PATIENCE_S = 60.0
PROFILE = NodeProfile(memory_bytes=4 * 10**9, gflops=10.0, threads=1)


class Feeder:
    """A coordinator's port on which a root finds its feed, and nobody anything else."""

    def __init__(self, identity: Identity) -> None:
        self._context = tls_context(identity, server_side=True)
        self._context.set_alpn_protocols([FEED_PROTOCOL])
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._sock.getsockname()[:2]
        self._links: queue.Queue[StreamLink] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def accept(self) -> StreamLink:
        return self._links.get(timeout=PATIENCE_S)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(sock,), daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        with contextlib.suppress(LinkError, OSError):  # one who wants to be observed
            self._links.put(finish(self._greet(sock), sock, Deadline(5.0)))

    def _greet(self, sock: socket.socket) -> Any:
        tune(sock)
        channel = TlsChannel(sock, self._context, server_side=True)
        name = yield from authenticate(channel)
        said = yield from hear_introduction(channel)
        yield from introduce(channel, said)
        return StreamLink(channel, LinkConfig(headers=Data, generation=said.generation), peer=name)


class Worker:
    """A station process and the agent's end of its control link."""

    def __init__(self, identity: Identity, coordinator: Address, **changes: Any) -> None:
        self.name = identity.name
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ravnest.node.station", "--control", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.link = unix_link(ours, LinkConfig(headers=FromWorker), peer=self.name)
        given: dict[str, Any] = {"coordinator": coordinator, "profile": PROFILE, **changes}
        self.tell(Begin(identity=str(identity.directory), shelf=str(identity.directory / "copies"), **given))
        self.where = Whereabouts()

    def tell(self, said: msgspec.Struct) -> None:
        self.link.send(said, deadline_s=PATIENCE_S)

    def hear(self, kind: type[T]) -> T:
        """The next message of this kind; others in between are dropped."""
        while True:
            said = self.link.receive(lambda header, lengths: [], deadline_s=PATIENCE_S)
            if isinstance(said, kind):
                return said

    def hear_report(self, kind: type[T]) -> T:
        while True:
            report: Reports = self.hear(Report).report
            if isinstance(report, kind):
                return report
            assert type(report).__name__ != "Failed", report

    def end(self) -> int:
        with contextlib.suppress(LinkError):
            self.tell(Stop())
        try:
            return self.process.wait(10.0)
        finally:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10.0)
            self.link.close()


class Tiny(nn.Module):
    """Two layers to cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(x)))
        return result


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


class Job:
    """A program of two stages, and the parts of a cluster that trains it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        self.batch = (x, x.sum(1, keepdim=True))
        self.program: Program = trace(Tiny, mean_square, self.batch)
        cut = next(i for i, op in enumerate(self.program.ops) if "relu" in op.op)
        self.stages: list[Stage] = split(self.program, [cut])
        self.rules = [Rule(accumulate=1, depth=2, delay=1), Rule(accumulate=1, depth=1, delay=1)]

    def brief(self, index: int) -> bytes:
        role = roles(self.stages, [rule.delay for rule in self.rules])[index]
        settings = Settings(optimizer=SGD(0.05), correction=none(), seed=1, patience_s=30.0)
        # What a stranger says of this machine is not believed:
        return msgspec.msgpack.encode(
            Assign(
                settings=settings, rule=self.rules[index], role=role, max_batch=8, threads=4000, core=4000,
                weights="/nowhere",
            )
        )  # fmt: skip

    def take(
        self,
        index: int,
        generation: int,
        coordinator: Address,
        peers: dict[str, Whereabouts],
        file: bytes | None = None,
    ) -> Take:
        """The part of one stage; `peers` are the neighbours, those before it first."""
        directory = self.directory / f"{generation}-{index}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "stage").write_bytes(file or dump(self.stages[index]))
        (directory / "brief").write_bytes(self.brief(index))
        given = [Peer(name=name, where=where, relay_token="t" * 32) for name, where in peers.items()]
        before, after = (None, given[0]) if index == 0 else (given[0], None)
        part = Part(
            generation=generation, cluster="c1", stage=index, count=2, file=Blob("", 0), brief=Blob("", 0),
            before=before, after=after,
        )  # fmt: skip
        return Take(part=part, coordinator=coordinator, file=str(directory / "stage"), brief=str(directory / "brief"))


def feed(link: StreamLink, leaves: Sequence[Tensor], number: int) -> None:
    buffers = [as_bytes(t.contiguous()) for t in leaves]
    link.send(Forward(number, len(leaves[0])), buffers, deadline_s=PATIENCE_S)


def acknowledged(link: StreamLink) -> int:
    header = link.receive(lambda header, lengths: [memoryview(bytearray(n)) for n in lengths], deadline_s=PATIENCE_S)
    assert isinstance(header, Backward)
    return header.microbatch


@contextlib.contextmanager
def ending(*parts: Worker | Feeder) -> Iterator[None]:
    try:
        yield
    finally:
        for part in parts:
            part.end() if isinstance(part, Worker) else part.close()
