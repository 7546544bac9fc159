"""Averaging, part (b): clusters that cut the model differently average it over home lines, in TLS.

    python -m benchmarks.rings_wan --json FILE

Ten PCs of the testbed in four clusters, each with a line of 100 Mbit/s up and down, 5 ms from any other, run the
averaging engine in a process each (`rings_wan_member`); nothing is trained. Against the time that the line of the
largest node needs for its bytes (`rings_wan_task`), against four PCs with the whole model each, and with bf16 and int8.
A round lasts from the first node's beginning to the last one's end. Errors are those of the averages against fp32's,
without feedback from earlier rounds, over the size of the averages, both as root mean squares.
"""

from __future__ import annotations

import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from benchmarks.report import Report, arguments
from benchmarks.rings_wan_member import Account, Order, Seating
from benchmarks.rings_wan_task import (
    CLUSTERS,
    PIECE_ELEMENTS,
    RATE_BYTES_PER_S,
    REPLICAS,
    bound_s,
    held_bytes,
    lay,
    topology,
)
from benchmarks.wan_bystanders import Bystanders
from ravnest.net.identity import make_authority, make_key, make_request, save_identity
from ravnest.plan import Rings
from ravnest.testbed import Process, Testbed, missing

__all__ = ["add_wan"]

PATIENCE_S = 150.0
# 1448 of 1500 bytes of a packet are TCP's payload, and a TLS record of 16 kB has 22 more; acknowledgements come on top.
WIRE_OVER_PAYLOAD = 1500 / 1448 * (16384 + 22) / 16384
T = TypeVar("T")


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report("rings over home lines: 100 Mbit/s, 5 ms apart, TLS")
    add_wan(report, quick=options.quick)
    report.finish(options.json)


def add_wan(report: Report, *, quick: bool) -> None:
    """Rows and checks; nothing but a reason where there can be no testbed."""
    lacking = missing()
    if lacking:
        report.rows.append({"who": f"not measured: this machine cannot have a testbed, it lacks {'; '.join(lacking)}"})
        return
    turns = 1 if quick else 3
    several = lay(CLUSTERS)
    rounds, others_cores = measure(several, ["fp32"] * (turns + 1) + ["bf16", "int8"] * turns)
    whole_rounds, whole_others_cores = measure(lay(REPLICAS), ["fp32"] * (turns + 1))
    whole_s = statistics.median(round_.seconds for round_ in whole_rounds[1:])
    who = f"{len(several.rings)} rings of 4, {len(held_bytes(several))} PCs"
    seconds = {codec: add_row(report, who, codec, rounds[1:], whole_s) for codec in ("fp32", "bf16", "int8")}
    add_row(report, "1 ring of 4, whole model each", "fp32", whole_rounds[1:], whole_s)
    add_bytes(report, several, rounds[1])
    limit_s = bound_s(several, len(CLUSTERS))
    report.check("bound / seconds of a round, fp32", limit_s / seconds["fp32"], ">= 0.9")
    report.check("whole-model replicas / ours, seconds", whole_s / seconds["fp32"], "> 1")
    report.check("cores that others used", max(others_cores, whole_others_cores), "<= 0.3")


@dataclass(frozen=True)
class Round:
    """What became of a round: each node's account, and what its line carried."""

    codec: str
    accounts: Mapping[str, Account]
    wire_bytes: Mapping[str, int]
    cpu_s: float  # of all nodes and of the testbed's own wires

    @property
    def seconds(self) -> float:
        accounts = self.accounts.values()
        return max(a.ended_s for a in accounts) - min(a.began_s for a in accounts)

    @property
    def error(self) -> float:
        accounts = self.accounts.values()
        return float((sum(a.squared_error for a in accounts) / sum(a.squared_value for a in accounts)) ** 0.5)


def add_row(report: Report, who: str, codec: str, rounds: Sequence[Round], whole_s: float) -> float:
    """The median of the rounds with this codec, against what the busiest line needs for the codec's bytes."""
    chosen = [round_ for round_ in rounds if round_.codec == codec]
    seconds = statistics.median(round_.seconds for round_ in chosen)
    sent = max(account.sent_bytes for account in chosen[0].accounts.values())
    limit_s = sent / RATE_BYTES_PER_S
    row: dict[str, Any] = {"who": who, "codec": codec, "seconds": seconds, "most sent, MB": sent / 1e6}
    row |= {"its line, s": limit_s, "line / seconds": limit_s / seconds, "x whole replicas": whole_s / seconds}
    cores = statistics.median(round_.cpu_s / round_.seconds for round_ in chosen)
    report.rows.append({**row, "error": chosen[0].error, "cores busy": cores})
    return seconds


def add_bytes(report: Report, rings: Rings, round_: Round) -> None:
    """What each node sent against 2 (C - 1) / C * S, as the engine counts and as its line carried."""
    off = off_wire = 0.0
    for name, held in held_bytes(rings).items():
        formula = 2 * (len(CLUSTERS) - 1) / len(CLUSTERS) * held
        sent, wire = round_.accounts[name].sent_bytes, round_.wire_bytes[name]
        report.rows.append(
            {"node": name, "rings": sum(name in ring.members for ring in rings.rings), "S, MB": held / 1e6,
             "formula, MB": formula / 1e6, "sent, MB": sent / 1e6, "on the wire, MB": wire / 1e6,
             "wire / (sent with TLS and TCP)": wire / WIRE_OVER_PAYLOAD / sent}
        )  # fmt: skip
        off = max(off, abs(sent / formula - 1))
        off_wire = max(off_wire, abs(wire / WIRE_OVER_PAYLOAD / formula - 1))
    report.check("bytes sent, most off the formula", off, "<= 0.02")
    report.check("bytes on the wire less TLS and TCP, most off the formula", off_wire, "<= 0.02")


def measure(rings: Rings, codecs: Sequence[str]) -> tuple[list[Round], float]:
    """A round for each codec, the first to warm up; and the cores that others used meanwhile."""
    with (
        tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder,
        Testbed(topology(rings)) as bed,
        _Members(bed, rings, Path(folder)) as members,
    ):
        others = Bystanders(bed)
        rounds = [members.average(Order(number, codec)) for number, codec in enumerate(codecs)]
        return rounds, others.cores()


class _Members:
    """A process on each host, linked to its neighbours when this is entered."""

    def __init__(self, bed: Testbed, rings: Rings, folder: Path) -> None:
        self._bed, self._rings = bed, rings
        _make_identities(folder, list(bed.hosts))
        self._processes = {name: self._start(name, folder / name) for name in bed.hosts}

    def __enter__(self) -> _Members:
        for name, process in self._processes.items():
            _tell(process, self._seating(name))
        for process in self._processes.values():
            _hear(process, str)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
            if kind is None:
                process.wait(PATIENCE_S)

    def average(self, order: Order) -> Round:
        before, cpu_before_s = self._used()
        for process in self._processes.values():
            _tell(process, order)
        accounts = {name: _hear(process, Account) for name, process in self._processes.items()}
        after, cpu_s = self._used()
        wire = {name: after[name] - before[name] for name in after}
        return Round(order.codec, accounts, wire, cpu_s - cpu_before_s)

    def _used(self) -> tuple[dict[str, int], float]:
        """What each line has carried up, and the processor seconds of all."""
        usage = {name: self._bed.usage(name) for name in self._processes}
        cpu_s = sum(used.cpu_s for used in usage.values()) + self._bed.forwarder_cpu_s()
        return {name: used.sent_bytes for name, used in usage.items()}, cpu_s

    def _start(self, name: str, folder: Path) -> Process:
        command = [sys.executable, "-m", "benchmarks.rings_wan_member", str(folder)]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return self._bed.hosts[name].run(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1)

    def _seating(self, name: str) -> Seating:
        mine = {number: ring for number, ring in enumerate(self._rings.rings) if name in ring.members}
        return Seating(
            members={number: ring.members for number, ring in mine.items()},
            num_elements={number: ring.segment.parameter_bytes // 4 for number, ring in mine.items()},
            addresses={host: self._bed.address(host) for host in self._processes},
            piece_elements=PIECE_ELEMENTS,
        )


def _make_identities(folder: Path, names: Sequence[str]) -> None:
    now, valid = datetime.now(UTC), timedelta(days=1)
    authority = make_authority("bench", now=now, valid=valid)
    for name in names:
        key = make_key()
        certificate = authority.sign(make_request(key, name), name, now=now, valid=valid)
        save_identity(folder / name, key, certificate, authority.certificate_pem)


def _tell(process: Process, what: msgspec.Struct) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(what).decode() + "\n")
    process.stdin.flush()


def _hear(process: Process, kind: type[T]) -> T:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
        raise RuntimeError(f"{process.host} says nothing")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.host} ended with code {process.wait()}")
    return msgspec.json.decode(line, type=kind)


if __name__ == "__main__":
    main()
