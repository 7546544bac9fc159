"""Measures hivemind's averaging of the same vectors on the same host, by `DecentralizedAverager.step`.

Its peers find each other again in every round, for a second at least, and that is part of a round; so the result is
reported without a check. hivemind runs in a Python of its own, without Ravnest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess

from benchmarks.report import Report

__all__ = ["add_hivemind"]

_TIMEOUT_S = 300.0
_CHILD = """
import json, sys, time, torch, hivemind
from hivemind.averaging import DecentralizedAverager
torch.set_num_threads(1)
num_members, megabytes, turns = map(int, sys.argv[1:])
if __name__ == "__main__":
    here = {"start": True, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}
    first = hivemind.DHT(**here)
    known = [str(address) for address in first.get_visible_maddrs()]
    tables = [first] + [hivemind.DHT(initial_peers=known, **here) for _ in range(num_members - 1)]
    peers = [
        DecentralizedAverager(
            [torch.full((megabytes * 10**6 // 4,), i + 1.0)], table, prefix="bench", start=True,
            target_group_size=num_members, min_group_size=num_members, min_matchmaking_time=1.0, request_timeout=0.9,
        )
        for i, table in enumerate(tables)
    ]
    seconds = []
    for turn in range(turns + 1):
        began = time.perf_counter()
        steps = [peer.step(wait=False, timeout=60) for peer in peers]
        for step in steps:
            step.result(timeout=60)
        seconds.append(time.perf_counter() - began)
    with peers[0].get_tensors() as tensors:
        assert abs(float(tensors[0][0]) - (num_members + 1) / 2) < 1e-3
    print(json.dumps(seconds[1:]), flush=True)
    for part in (*peers, *tables):
        part.shutdown()
"""


def add_hivemind(report: Report, python: str, *, quick: bool) -> None:
    """Add two columns to the rows of `benchmarks.rings.host`; in a quick run to the first row only."""
    for row in report.rows[:1] if quick else list(report.rows):
        seconds = _measure(python, row["members"], row["MB"], turns=3)
        rate = row["MB"] / 1e3 / statistics.median(seconds)
        row |= {"hivemind GB/s": rate, "Ravnest / hivemind": row["Ravnest GB/s"] / rate}


def _measure(python: str, num_members: int, megabytes: int, turns: int) -> list[float]:
    command = [python, "-c", _CHILD, *map(str, (num_members, megabytes, turns))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=_TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its child processes would outlive it
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"hivemind: {errors[-1500:]}")
    return [float(s) for s in json.loads(output.splitlines()[-1])]
