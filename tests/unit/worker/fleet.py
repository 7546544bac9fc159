"""A worker process of a fleet with the agent's end of its control link, and a coordinator that only feeds."""

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

from ravnest.core.clock import Deadline
from ravnest.core.schedule import StageSchedule
from ravnest.errors import LinkError
from ravnest.graph import Program, Stage, dump, split, trace
from ravnest.pipeline.config import StageConfig, TrainerConfig, roles
from ravnest.pipeline.optimizers import SGD
from ravnest.pipeline.staleness import none
from ravnest.pipeline.tensor_codec import as_bytes
from ravnest.protocol.commands import Report, StopStage
from ravnest.protocol.control import Assignment, Blob, NodeProfile, StageReport
from ravnest.protocol.peer import Peer, PeerAddresses
from ravnest.protocol.pipeline import Backward, Data, Forward
from ravnest.protocol.relay import FEED_PROTOCOL
from ravnest.protocol.worker import AssignStage, FromWorker, StartWorker
from ravnest.transport.address import Address
from ravnest.transport.identity import Identity
from ravnest.transport.link import LinkConfig
from ravnest.transport.local import unix_link
from ravnest.transport.p2p.dialer import receive_introduction, send_introduction
from ravnest.transport.socket import run_blocking
from ravnest.transport.stream import StreamLink
from ravnest.transport.tls import TlsChannel, authenticate, tls_context, tune

T = TypeVar("T")

TIMEOUT_S = 60.0
PROFILE = NodeProfile(memory_bytes=4 * 10**9, gflops=10.0, threads=1)


class Feeder:
    """A coordinator's port that serves nothing but the feed of a first stage."""

    def __init__(self, identity: Identity) -> None:
        self._context = tls_context(identity, server_side=True)
        self._context.set_alpn_protocols([FEED_PROTOCOL])
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._sock.getsockname()[:2]
        self._links: queue.Queue[StreamLink] = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def accept(self) -> StreamLink:
        return self._links.get(timeout=TIMEOUT_S)

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
            threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        with contextlib.suppress(LinkError, OSError):  # a connection that only observes the address
            self._links.put(run_blocking(self._handshake(sock), sock, Deadline(5.0)))

    def _handshake(self, sock: socket.socket) -> Any:
        tune(sock)
        channel = TlsChannel(sock, self._context, server_side=True)
        name = yield from authenticate(channel)
        introduction = yield from receive_introduction(channel)
        yield from send_introduction(channel, introduction)
        return StreamLink(channel, LinkConfig(headers=Data, generation=introduction.generation), peer=name)


class Worker:
    """A worker process and the agent's end of its control link."""

    def __init__(self, identity: Identity, coordinator: Address, **changes: Any) -> None:
        self.name = identity.name
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ravnest.worker.process", "--control", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.link = unix_link(ours, LinkConfig(headers=FromWorker), peer=self.name)
        options: dict[str, Any] = {"coordinator": coordinator, "profile": PROFILE, **changes}
        directory = identity.directory
        self.send(
            StartWorker(
                name=self.name, identity=str(directory), replica_directory=str(directory / "replicas"), **options
            )
        )

    def send(self, message: msgspec.Struct) -> None:
        self.link.send(message, deadline_s=TIMEOUT_S)

    def receive(self, kind: type[T]) -> T:
        """Return the next message of this kind; others in between are dropped."""
        while True:
            message = self.link.receive(lambda header, lengths: [], deadline_s=TIMEOUT_S)
            if isinstance(message, kind):
                return message

    def receive_report(self, kind: type[T]) -> T:
        while True:
            report: Report = self.receive(StageReport).report
            if isinstance(report, kind):
                return report
            assert type(report).__name__ != "StageFailed", report

    def end(self) -> int:
        with contextlib.suppress(LinkError):
            self.send(StopStage())
        try:
            return self.process.wait(60.0)
        finally:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(60.0)
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
    """A program of two stages, and the assignments of a cluster that trains it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        self.batch = (x, x.sum(1, keepdim=True))
        self.program: Program = trace(Tiny, mean_square, self.batch)
        cut = next(i for i, op in enumerate(self.program.ops) if "relu" in op.op)
        self.stages: list[Stage] = split(self.program, [cut])
        self.schedules = [StageSchedule(accumulate=1, depth=2, delay=1), StageSchedule(accumulate=1, depth=1, delay=1)]

    def config(self, index: int) -> bytes:
        role = roles(self.stages, [schedule.delay for schedule in self.schedules])[index]
        settings = TrainerConfig(optimizer=SGD(0.05), correction=none(), seed=1, timeout_s=30.0)
        # Settings for the node's machine must be replaced by the owner's.
        return msgspec.msgpack.encode(
            StageConfig(
                settings=settings, rule=self.schedules[index], role=role, max_batch=8, threads=4000, core=4000,
                weights="/nowhere",
            )
        )  # fmt: skip

    def assign(
        self,
        index: int,
        generation: int,
        coordinator: Address,
        peers: dict[str, PeerAddresses],
        file: bytes | None = None,
    ) -> AssignStage:
        """Write the files of one stage; `peers` are its neighbours."""
        directory = self.directory / f"{generation}-{index}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "stage").write_bytes(file or dump(self.stages[index]))
        (directory / "config").write_bytes(self.config(index))
        neighbours = [Peer(name=name, addresses=where, relay_token="t" * 32) for name, where in peers.items()]
        before, after = (None, neighbours[0]) if index == 0 else (neighbours[0], None)
        assignment = Assignment(
            generation=generation, cluster="c1", stage=index, count=2, file=Blob("", 0), config=Blob("", 0),
            before=before, after=after,
        )  # fmt: skip
        return AssignStage(
            assignment=assignment,
            coordinator=coordinator,
            file=str(directory / "stage"),
            config=str(directory / "config"),
        )


def feed(link: StreamLink, leaves: Sequence[Tensor], number: int) -> None:
    buffers = [as_bytes(t.contiguous()) for t in leaves]
    link.send(Forward(number, len(leaves[0])), buffers, deadline_s=TIMEOUT_S)


def acknowledged(link: StreamLink) -> int:
    header = link.receive(lambda header, lengths: [memoryview(bytearray(n)) for n in lengths], deadline_s=TIMEOUT_S)
    assert isinstance(header, Backward)
    return header.microbatch


@contextlib.contextmanager
def ending(*closed: Worker | Feeder) -> Iterator[None]:
    try:
        yield
    finally:
        for one in closed:
            one.end() if isinstance(one, Worker) else one.close()
