"""One member of the rings of `benchmarks.rings.host`: a process on one core that averages by gloo and by Ravnest.

Measures the averaging engine over shared memory links between processes of one host: neighbours read each other's
vectors in place from a `SharedBuffer`, into which a node would write its snapshot. gloo averages a vector in ordinary
memory. Both work in place, in alternating turns that all members start together. Ravnest also weights the contributions
and checks that all numbers are finite, which gloo does not.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from multiprocessing.queues import Queue as Results
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from ravnest.averaging.averager import Averager
from ravnest.averaging.contribution import Contribution, digest
from ravnest.averaging.ring import RingSpec
from ravnest.averaging.session import AttemptKey
from ravnest.averaging.shared_memory import SharedBuffer, shared_link
from ravnest.protocol.averaging import Message
from ravnest.transport.link import LinkConfig

__all__ = ["Task", "Turn", "run_member"]

_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Task:
    """The rank of a member, and the sizes and number of the averagings."""

    rank: int
    num_members: int
    gloo_port: int
    sizes_mb: tuple[int, ...]
    turns: int
    piece_elements: int


Turn: TypeAlias = tuple[int, int, str, float]
"""Megabytes, number of the turn, system, seconds."""


def run_member(task: Task, sockets: dict[int, socket.socket], results: Results[Turn]) -> None:
    """Run one member; `sockets` are connected to its neighbours."""
    os.sched_setaffinity(0, {task.rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.gloo_port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=task.rank, world_size=task.num_members)
    config = LinkConfig(headers=Message)
    window = SharedBuffer((sum(task.sizes_mb) + 1) * 10**6)
    links = {
        f"node-{peer}": shared_link(sock, config, peer=f"node-{peer}", buffer=window) for peer, sock in sockets.items()
    }
    with Averager(links) as averaging:
        number = 0
        for megabytes in task.sizes_mb:
            num_elements = megabytes * 10**6 // 4
            vectors = {"Ravnest": window.floats(num_elements), "gloo": np.empty(num_elements, np.float32)}
            for turn in range(task.turns + 1):
                for system in ("gloo", "Ravnest") if turn % 2 else ("Ravnest", "gloo"):
                    number += 1
                    seconds = _time(averaging, task, vectors[system], system, number)
                    if turn:  # the first turn is the warm-up
                        results.put((megabytes, turn, system, seconds))
            results.put((megabytes, 0, "digest", _time_digest(vectors["Ravnest"])))
        dist.barrier()
    dist.destroy_process_group()


def _time(
    averaging: Averager, task: Task, vector: np.ndarray[tuple[int], np.dtype[np.float32]], system: str, n: int
) -> float:
    vector.fill(task.rank + 1)
    dist.barrier()
    began_s = time.perf_counter()
    if system == "gloo":
        dist.all_reduce(torch.from_numpy(vector))
        expected = task.num_members * (task.num_members + 1) / 2
    else:
        part = Contribution(_spec(task), vector, vector)
        outcome = averaging.run(AttemptKey(n, 0), [part], deadline_s=_DEADLINE_S)
        if outcome.failed:
            raise outcome.failed[0]
        expected = (task.num_members + 1) / 2
    seconds = time.perf_counter() - began_s
    if not np.allclose(vector[:: max(1, vector.size // 1000)], expected):
        raise RuntimeError(f"{system} averaged wrongly: expected {expected}, got {vector[:3]}")
    return seconds


def _spec(task: Task) -> RingSpec:
    return RingSpec(
        id=0,
        members=tuple(f"node-{rank}" for rank in range(task.num_members)),
        me=f"node-{task.rank}",
        weights=(1.0,) * task.num_members,
        chunk_elements=task.piece_elements,
    )


def _time_digest(vector: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    began_s = time.perf_counter()
    digest(vector)
    return time.perf_counter() - began_s
