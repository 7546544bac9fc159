"""One member of the rings that `benchmarks.rings_host` times: a process on one core that averages by gloo and by ours.

Both work in place, each on a vector of its own, in turns, each turn begun together. Ours lies in a window, which is
where a snapshot would be written to. Ours also weighs the contributions and looks whether all numbers are finite, which
gloo does not.
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

from ravnest.net.link import LinkConfig
from ravnest.rings.attempt import Key
from ravnest.rings.averaging import Averaging
from ravnest.rings.digest import digest
from ravnest.rings.messages import Message
from ravnest.rings.part import Part
from ravnest.rings.shared import shared_link
from ravnest.rings.spec import RingSpec
from ravnest.rings.window import Window

__all__ = ["Task", "Turn", "take_part"]

_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Task:
    """What a member is told: who it is, and what is averaged how often."""

    rank: int
    num_members: int
    gloo_port: int
    sizes_mb: tuple[int, ...]
    turns: int
    piece_elements: int


Turn: TypeAlias = tuple[int, int, str, float]
"""Megabytes, number of the turn, who, seconds."""


def take_part(task: Task, sockets: dict[int, socket.socket], results: Results[Turn]) -> None:
    """What the process runs; `sockets` lead to the neighbours."""
    os.sched_setaffinity(0, {task.rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.gloo_port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=task.rank, world_size=task.num_members)
    config = LinkConfig(headers=Message)
    window = Window((sum(task.sizes_mb) + 1) * 10**6)
    links = {
        f"node-{peer}": shared_link(sock, config, peer=f"node-{peer}", window=window) for peer, sock in sockets.items()
    }
    with Averaging(links) as averaging:
        number = 0
        for megabytes in task.sizes_mb:
            num_elements = megabytes * 10**6 // 4
            vectors = {"ours": window.floats(num_elements), "gloo": np.empty(num_elements, np.float32)}
            for turn in range(task.turns + 1):
                for who in ("gloo", "ours") if turn % 2 else ("ours", "gloo"):
                    number += 1
                    seconds = _time(averaging, task, vectors[who], who, number)
                    if turn:  # the first is warming up
                        results.put((megabytes, turn, who, seconds))
            results.put((megabytes, 0, "digest", _time_digest(vectors["ours"])))
        dist.barrier()
    dist.destroy_process_group()


def _time(
    averaging: Averaging, task: Task, vector: np.ndarray[tuple[int], np.dtype[np.float32]], who: str, n: int
) -> float:
    vector.fill(task.rank + 1)
    dist.barrier()
    began_s = time.perf_counter()
    if who == "gloo":
        dist.all_reduce(torch.from_numpy(vector))
        wanted = task.num_members * (task.num_members + 1) / 2
    else:
        part = Part(_spec(task), vector, vector)
        outcome = averaging.run(Key(n, 0), [part], deadline_s=_DEADLINE_S)
        if outcome.failed:
            raise outcome.failed[0]
        wanted = (task.num_members + 1) / 2
    seconds = time.perf_counter() - began_s
    if not np.allclose(vector[:: max(1, vector.size // 1000)], wanted):
        raise RuntimeError(f"{who} averaged wrongly: {vector[:3]} where {wanted} is right")
    return seconds


def _spec(task: Task) -> RingSpec:
    return RingSpec(
        id=0,
        members=tuple(f"node-{rank}" for rank in range(task.num_members)),
        me=f"node-{task.rank}",
        weights=(1.0,) * task.num_members,
        piece_elements=task.piece_elements,
    )


def _time_digest(vector: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    began_s = time.perf_counter()
    digest(vector)
    return time.perf_counter() - began_s
