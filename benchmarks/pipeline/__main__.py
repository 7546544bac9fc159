"""Compares the asynchronous pipeline with torch's schedules, DDP, one process and two independent ones, on two cores.

All train the same GPT with AdamW on pinned cores, in turns, several times; ratios are taken within a turn and their
median is reported. Two independent processes are the ceiling: two cores cannot be used better. Also measures the CPU
time of links per gigabyte, and the memory of workers against the plan.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

import ravnest
from benchmarks.pipeline.baselines import CONFIG, LR, SEQUENCES, batch
from benchmarks.report import Report, arguments
from ravnest.config import TrainingConfig
from ravnest.examples.gpt import GPT, next_token_loss
from ravnest.protocol.pipeline import Data, Norm
from ravnest.run.job import Job, Run
from ravnest.transport.identity import Identity, make_authority, make_key, make_request, save_identity
from ravnest.transport.link import Link, LinkConfig
from ravnest.transport.local import unix_pair
from ravnest.transport.p2p.candidates import PeerCandidates
from ravnest.transport.p2p.endpoint import PeerEndpoint

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
ACCUMULATE = 8  # microbatches per update of Ravnest, `single` and `two`; the larger number of the other baselines
WARM_UP = 6  # steps of a Ravnest run that do not count


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report("pipeline: a GPT of 8 layers on two cores, samples/s relative to one process")
    microbatches = (4,) if options.quick else (4, 8)
    schedules = ("1F1B",) if options.quick else SCHEDULES
    baselines = [("ddp", m) for m in microbatches] + [(s, m) for s in schedules for m in microbatches]
    turns = [turn(baselines, quick=options.quick, number=i) for i in range(1 if options.quick else 5)]
    add_rows(report, turns)
    add_links(report, megabytes=100 if options.quick else 600)
    report.finish(options.json)


def turn(baselines: list[tuple[str, int]], *, quick: bool, number: int) -> dict[str, float]:
    """Measure all once; the order alternates from turn to turn."""
    steps, many = (6, 4) if quick else (8, ACCUMULATE)
    jobs: list[tuple[str, Any]] = [
        ("single", lambda: baseline("single", many, steps // 2)),
        ("two", lambda: baseline("two", many, steps // 2)),
    ]
    jobs += [(f"{mode} {m}", lambda mode=mode, m=m: baseline(mode, m, steps * 4 // m)) for mode, m in baselines]
    jobs += [("Ravnest", lambda: ravnest_run("local:2", "0,1", 11 if quick else 22))]
    if not quick:
        jobs += [("Ravnest, 4 processes", lambda: ravnest_run("local:4", "0,1,0,1", 22))]
    results: dict[str, float] = {}
    for name, measure in jobs if number % 2 == 0 else reversed(jobs):
        result = measure()
        results.update(
            {name: result} if isinstance(result, float) else {f"{name}{key}": v for key, v in result.items()}
        )
        sys.stderr.write(f"turn {number}: {name} {results[name]:.1f} samples/s\n")
    return results


def baseline(mode: str, microbatches: int, steps: int) -> float:
    command = [sys.executable, "-m", "benchmarks.pipeline.baselines", "--mode", mode]
    command += ["--microbatches", str(microbatches), "--steps", str(max(3, steps))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{mode}: {done.stderr[-1500:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_s"])


def ravnest_run(on: str, cores: str, steps: int) -> dict[str, float]:
    """Train by the public API; returns the rate after the warm-up, from the run's own log."""
    job = Job(
        lambda: GPT(CONFIG),
        next_token_loss,
        [batch(ACCUMULATE, seed) for seed in range(4)],
        optimizer=ravnest.AdamW(LR),
    )
    folder = Path(tempfile.mkdtemp(prefix="ravnest-bench-"))
    try:
        run = job.train(
            TrainingConfig(steps=steps, on=on, cores=cores, microbatches_per_step=ACCUMULATE, run_dir=folder / "run")
        )
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        return {"": rate(lines), **account(run, lines)}
    finally:
        shutil.rmtree(folder)


def rate(lines: list[dict[str, Any]]) -> float:
    """Samples per second between the warm-up and the last step but one (then the pipeline drains)."""
    first, last = lines[WARM_UP - 1], lines[-2]
    return float((last["step"] - first["step"]) * ACCUMULATE * SEQUENCES / (last["seconds"] - first["seconds"]))


def account(run: Run, lines: list[dict[str, Any]]) -> dict[str, float]:
    """The idle share of the busiest stage in that time, and the relative error of the planned memory."""
    early, late = ({m["stage"]: m for m in lines[i]["stages"]} for i in (WARM_UP - 1, -2))
    bubbles = []
    for stage, now in late.items():
        busy = now["steady_busy_s"] - early[stage]["steady_busy_s"]
        idle = now["idle_s"] - early[stage]["idle_s"]
        bubbles.append(idle / (busy + idle))
    memory_errors = [abs(m.peak_memory_bytes / run.plan.plans[i].memory_bytes - 1) for i, m in run.stages.items()]
    return {" bubble": min(bubbles), " memory error": max(memory_errors)}


def add_rows(report: Report, turns: list[dict[str, float]]) -> None:
    names = [n for n in turns[0] if not n.endswith((" bubble", " memory error"))]

    def median(name: str, base: str) -> float:
        return statistics.median(t[name] / t[base] for t in turns)

    for name in sorted(names, key=lambda n: median(n, "single")):
        row = {"system": name, "samples/s": statistics.median(t[name] for t in turns)}
        report.rows.append({**row, "of one process": median(name, "single"), "of the ceiling": median(name, "two")})
    torch_best = max((n for n in names if n.split()[0] in SCHEDULES), key=lambda n: median(n, "single"))
    ddp_best = max((n for n in names if n.startswith("ddp")), key=lambda n: median(n, "single"))
    report.check("Ravnest / ceiling", median("Ravnest", "two"), ">= 0.95")
    report.check(f"Ravnest / best torch schedule ({torch_best})", median("Ravnest", torch_best), ">= 1.1")
    report.check(f"Ravnest / DDP ({ddp_best})", median("Ravnest", ddp_best), "> 1")
    report.check("bubble of the busiest stage", statistics.median(t["Ravnest bubble"] for t in turns), "< 0.02")
    if "Ravnest, 4 processes" in names:
        report.check("Ravnest with 4 processes / ceiling", median("Ravnest, 4 processes", "two"), ">= 0.9")
    report.check("worst memory / plan - 1", statistics.median(t["Ravnest memory error"] for t in turns), "<= 0.15")


def add_links(report: Report, megabytes: int) -> None:
    for name, make, target in (("unix socket", _unix, "<= 0.6"), ("TLS 1.3", _tls, "<= 2.5")):
        seconds = statistics.median(cpu_per_gb(*make(), megabytes) for _ in range(3))
        report.check(f"CPU seconds per GB, both ends, {name}", seconds, target)


def cpu_per_gb(left: Link, right: Link, megabytes: int) -> float:
    """CPU seconds of this process per gigabyte, sent in messages of 1 MB, the size of activations."""
    outgoing, incoming = torch.zeros(2**20, dtype=torch.uint8), torch.zeros(2**20, dtype=torch.uint8)
    receiver = threading.Thread(target=_receive, args=(right, incoming, megabytes))
    began = time.process_time()
    receiver.start()
    for _ in range(megabytes):
        left.send(Norm(0, 0.0), [outgoing.numpy().data], deadline_s=60.0)
    receiver.join()
    used = time.process_time() - began
    left.close()
    right.close()
    return used / (megabytes * 2**20 / 1e9)


def _receive(link: Link, incoming: torch.Tensor, count: int) -> None:
    for _ in range(count):
        link.receive(lambda header, lengths: [incoming.numpy().data], deadline_s=60.0)


def _unix() -> tuple[Link, Link]:
    return unix_pair(LinkConfig(headers=Data))


def _tls() -> tuple[Link, Link]:
    with tempfile.TemporaryDirectory() as folder:
        return tls_pair(*identities(Path(folder)), LinkConfig(headers=Data))


def tls_pair(left: Identity, right: Identity, config: LinkConfig) -> tuple[Link, Link]:
    """Both ends of a TLS link between two endpoints on this host."""
    with (
        PeerEndpoint(("127.0.0.1", 0), left, allowed=lambda name: True) as one,
        PeerEndpoint(("127.0.0.1", 0), right, allowed=lambda name: True) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        peer = PeerCandidates(name=left.name, addresses=(one.address,))
        dialed = pool.submit(other.connect, peer, config, deadline_s=10.0)
        accepted = one.connect(PeerCandidates(name=right.name), config, deadline_s=10.0)
        return accepted.link, dialed.result().link


def identities(folder: Path) -> tuple[Identity, Identity]:
    """Two nodes of one authority."""
    now, valid = datetime.now(UTC), timedelta(days=1)
    authority = make_authority("bench", now=now, valid=valid)
    for name in ("node-a", "node-b"):
        key = make_key()
        signed = authority.sign(make_request(key, name), name, now=now, valid=valid)
        save_identity(folder / name, key, signed, authority.certificate_pem)
    return Identity.load(folder / "node-a"), Identity.load(folder / "node-b")


if __name__ == "__main__":
    main()
