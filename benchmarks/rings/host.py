"""Part (a) of `benchmarks.rings`: averaging on one host over shared memory, against gloo's all_reduce in the same run.

Algorithm bandwidth is the vector's bytes over the time of the slowest member. The order alternates from turn to turn;
the ratio is taken within a turn, and its median is reported.
"""

from __future__ import annotations

import socket
import statistics
from collections import defaultdict
from typing import Any

import torch.multiprocessing as mp

from benchmarks.report import Report
from benchmarks.rings.member import Task, Turn, run_member

__all__ = ["add_host"]

_WAIT_S = 300.0


def add_host(report: Report, *, quick: bool, piece_elements: int) -> None:
    """Add a row and a check for every number of members and every size."""
    sizes_mb, turns = ((64,), 3) if quick else ((64, 256), 9)
    for num_members in (2, 3, 4):
        results_by_size = _measure(num_members, sizes_mb, turns, piece_elements)
        for megabytes in sizes_mb:
            _add_row(report, num_members, megabytes, results_by_size[megabytes])


def _add_row(report: Report, num_members: int, megabytes: int, seconds: dict[str, list[float]]) -> None:
    ratio = statistics.median(g / r for g, r in zip(seconds["gloo"], seconds["Ravnest"], strict=True))
    row: dict[str, Any] = {"members": num_members, "MB": megabytes}
    row |= {f"{system} GB/s": megabytes / 1e3 / statistics.median(seconds[system]) for system in ("Ravnest", "gloo")}
    report.rows.append({**row, "Ravnest / gloo": ratio, "digest GB/s": megabytes / 1e3 / max(seconds["digest"])})
    target = ">= 2" if num_members == 2 else ">= 1.3"
    report.check(f"Ravnest / gloo, {num_members} members, {megabytes} MB", ratio, target)


def _measure(
    num_members: int, sizes_mb: tuple[int, ...], turns: int, piece_elements: int
) -> dict[int, dict[str, list[float]]]:
    """For each size and each system, the seconds of every turn, which are those of the slowest member."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    ends = _connect(num_members)
    members = []
    for rank in range(num_members):
        task = Task(rank, num_members, port, sizes_mb, turns, piece_elements)
        members.append(context.Process(target=run_member, args=(task, ends[rank], results), daemon=True))
        members[-1].start()
    measured: list[Turn] = [results.get(timeout=_WAIT_S) for _ in range(num_members * len(sizes_mb) * (2 * turns + 1))]
    for member in members:
        member.join(_WAIT_S)
    for sockets in ends.values():
        for sock in sockets.values():
            sock.close()
    slowest: defaultdict[tuple[int, str, int], float] = defaultdict(float)
    for megabytes, turn, system, seconds in measured:
        slowest[megabytes, system, turn] = max(slowest[megabytes, system, turn], seconds)
    results_by_size: dict[int, dict[str, list[float]]] = {size: defaultdict(list) for size in sizes_mb}
    for (megabytes, system, _), seconds in sorted(slowest.items()):
        results_by_size[megabytes][system].append(seconds)
    return results_by_size


def _connect(num_members: int) -> dict[int, dict[int, socket.socket]]:
    """Connect neighbours by a pair of sockets; two members share one pair."""
    ends: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(num_members)}
    for rank in range(num_members if num_members > 2 else 1):
        other = (rank + 1) % num_members
        ends[rank][other], ends[other][rank] = socket.socketpair()
    return ends
