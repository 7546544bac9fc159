"""Part (a) of `benchmarks.rings`: members on one host over shared memory, against gloo's all_reduce, in the same run.

Algorithm bandwidth is the vector's bytes over the time of the slowest member. Who goes first changes from turn to turn;
the ratio is taken within a turn, and its median is reported.
"""

from __future__ import annotations

import socket
import statistics
from collections import defaultdict
from typing import Any

import torch.multiprocessing as mp

from benchmarks.report import Report
from benchmarks.rings_member import Task, Turn, take_part

__all__ = ["add_host"]

_WAIT_S = 300.0


def add_host(report: Report, *, quick: bool, piece_elements: int) -> None:
    """A row and a check for every number of members and every size."""
    sizes_mb, turns = ((64,), 3) if quick else ((64, 256), 9)
    for num_members in (2, 3, 4):
        found = _measure(num_members, sizes_mb, turns, piece_elements)
        for megabytes in sizes_mb:
            _add_row(report, num_members, megabytes, found[megabytes])


def _add_row(report: Report, num_members: int, megabytes: int, seconds: dict[str, list[float]]) -> None:
    ours, gloo = seconds["ours"], seconds["gloo"]
    ratio = statistics.median(g / o for g, o in zip(gloo, ours, strict=True))
    row: dict[str, Any] = {"members": num_members, "MB": megabytes}
    row |= {f"{who} GB/s": megabytes / 1e3 / statistics.median(seconds[who]) for who in ("ours", "gloo")}
    report.rows.append({**row, "ours / gloo": ratio, "digest GB/s": megabytes / 1e3 / max(seconds["digest"])})
    target = ">= 2" if num_members == 2 else ">= 1.3"
    report.check(f"ours / gloo, {num_members} members, {megabytes} MB", ratio, target)


def _measure(
    num_members: int, sizes_mb: tuple[int, ...], turns: int, piece_elements: int
) -> dict[int, dict[str, list[float]]]:
    """For each size and each way, the seconds of every turn: those of the slowest member."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    ends = _connect(num_members)
    members = []
    for rank in range(num_members):
        task = Task(rank, num_members, port, sizes_mb, turns, piece_elements)
        members.append(context.Process(target=take_part, args=(task, ends[rank], results), daemon=True))
        members[-1].start()
    told: list[Turn] = [results.get(timeout=_WAIT_S) for _ in range(num_members * len(sizes_mb) * (2 * turns + 1))]
    for member in members:
        member.join(_WAIT_S)
    for sockets in ends.values():
        for sock in sockets.values():
            sock.close()
    slowest: defaultdict[tuple[int, str, int], float] = defaultdict(float)
    for megabytes, turn, who, seconds in told:
        slowest[megabytes, who, turn] = max(slowest[megabytes, who, turn], seconds)
    found: dict[int, dict[str, list[float]]] = {size: defaultdict(list) for size in sizes_mb}
    for (megabytes, who, _), seconds in sorted(slowest.items()):
        found[megabytes][who].append(seconds)
    return found


def _connect(num_members: int) -> dict[int, dict[int, socket.socket]]:
    """A pair of sockets between neighbours; two members have one between them."""
    ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(num_members)}
    for rank in range(num_members if num_members > 2 else 1):
        other = (rank + 1) % num_members
        ends[rank][other], ends[other][rank] = socket.socketpair()
    return ends
