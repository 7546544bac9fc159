"""Part (b) of `benchmarks.rings`: averages clusters with different cuts over home lines, in TLS.

    python -m benchmarks.rings.wan --json FILE

Ten PCs of the testbed in four clusters, each with a line of 100 Mbit/s up and down, 5 ms from any other, run the
averaging engine in a process each (`benchmarks.rings.wan_member`); nothing is trained. Compared with the time that the
line of the largest node needs for its bytes (`benchmarks.rings.wan_task`) and with four PCs that hold the whole model
each; also with bf16 and int8. A round lasts from the start of the first node to the end of the last. Errors are root
mean squares of the difference from the fp32 averages, without error feedback from earlier rounds, relative to the root
mean square of the averages.
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
from benchmarks.rings.wan_member import AverageCommand, RingAssignment, RoundResult
from benchmarks.rings.wan_task import (
    CLUSTERS,
    PIECE_ELEMENTS,
    RATE_BYTES_PER_S,
    REPLICAS,
    bound_s,
    form_rings,
    held_bytes,
    topology,
)
from benchmarks.wan.background_load import BackgroundLoad
from ravnest.planner import Rings
from ravnest.transport.identity import make_authority, make_key, make_request, save_identity
from testbed import Process, Testbed, TestbedUnavailable, missing

__all__ = ["add_wan"]

TIMEOUT_S = 150.0
# 1448 of 1500 bytes of a packet are TCP payload, and a TLS record of 16 kB has 22 bytes more; without acknowledgements.
WIRE_OVER_PAYLOAD = 1500 / 1448 * (16384 + 22) / 16384
T = TypeVar("T")


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report("rings over home lines: 100 Mbit/s, 5 ms apart, TLS")
    add_wan(report, quick=options.quick)
    report.finish(options.json)


def add_wan(report: Report, *, quick: bool) -> None:
    """Add rows and checks, or the reason why this machine cannot run a testbed."""
    lacking = missing()
    if lacking:
        report.rows.append({"not measured": str(TestbedUnavailable(lacking))})
        return
    turns = 1 if quick else 3
    several = form_rings(CLUSTERS)
    rounds, background_cores = measure(several, ["fp32"] * (turns + 1) + ["bf16", "int8"] * turns)
    whole_rounds, whole_background_cores = measure(form_rings(REPLICAS), ["fp32"] * (turns + 1))
    whole_s = statistics.median(round_.seconds for round_ in whole_rounds[1:])
    description = f"{len(several.rings)} rings of 4, {len(held_bytes(several))} PCs"
    seconds = {codec: add_row(report, description, codec, rounds[1:], whole_s) for codec in ("fp32", "bf16", "int8")}
    add_row(report, "1 ring of 4, whole model each", "fp32", whole_rounds[1:], whole_s)
    add_bytes(report, several, rounds[1])
    limit_s = bound_s(several, len(CLUSTERS))
    report.check("bound / seconds of a round, fp32", limit_s / seconds["fp32"], ">= 0.9")
    report.check("whole-model replicas / Ravnest, seconds", whole_s / seconds["fp32"], "> 1")
    report.check("background cores", max(background_cores, whole_background_cores), "<= 0.3")


@dataclass(frozen=True)
class Round:
    """The results of a round: each node's own, and the bytes on its line."""

    codec: str
    results: Mapping[str, RoundResult]
    wire_bytes: Mapping[str, int]
    cpu_s: float  # of all nodes and of the testbed's forwarder

    @property
    def seconds(self) -> float:
        results = self.results.values()
        return max(a.ended_s for a in results) - min(a.began_s for a in results)

    @property
    def error(self) -> float:
        results = self.results.values()
        return float((sum(a.squared_error for a in results) / sum(a.squared_value for a in results)) ** 0.5)


def add_row(report: Report, rings: str, codec: str, rounds: Sequence[Round], whole_s: float) -> float:
    """Add the median of the rounds with this codec, against the time of the busiest line for the codec's bytes."""
    chosen = [round_ for round_ in rounds if round_.codec == codec]
    seconds = statistics.median(round_.seconds for round_ in chosen)
    sent = max(account.sent_bytes for account in chosen[0].results.values())
    limit_s = sent / RATE_BYTES_PER_S
    row: dict[str, Any] = {"rings": rings, "codec": codec, "seconds": seconds, "max sent, MB": sent / 1e6}
    row |= {"its line, s": limit_s, "line / seconds": limit_s / seconds, "x whole replicas": whole_s / seconds}
    cores = statistics.median(round_.cpu_s / round_.seconds for round_ in chosen)
    report.rows.append({**row, "error": chosen[0].error, "cores busy": cores})
    return seconds


def add_bytes(report: Report, rings: Rings, round_: Round) -> None:
    """Add what each node sent against 2 (C - 1) / C * S, by the engine's count and by its line's."""
    error = wire_error = 0.0
    for name, held in held_bytes(rings).items():
        formula = 2 * (len(CLUSTERS) - 1) / len(CLUSTERS) * held
        sent, wire = round_.results[name].sent_bytes, round_.wire_bytes[name]
        report.rows.append(
            {"node": name, "rings": sum(name in ring.members for ring in rings.rings), "S, MB": held / 1e6,
             "formula, MB": formula / 1e6, "sent, MB": sent / 1e6, "on the wire, MB": wire / 1e6,
             "wire / (sent with TLS and TCP)": wire / WIRE_OVER_PAYLOAD / sent}
        )  # fmt: skip
        error = max(error, abs(sent / formula - 1))
        wire_error = max(wire_error, abs(wire / WIRE_OVER_PAYLOAD / formula - 1))
    report.check("bytes sent, largest error of the formula", error, "<= 0.02")
    report.check("bytes on the wire without TLS and TCP, largest error of the formula", wire_error, "<= 0.02")


def measure(rings: Rings, codecs: Sequence[str]) -> tuple[list[Round], float]:
    """Run a round for each codec, the first as warm-up; also returns the background load in cores."""
    with (
        tempfile.TemporaryDirectory(prefix="ravnest-bench-") as folder,
        Testbed(topology(rings)) as testbed,
        _Members(testbed, rings, Path(folder)) as members,
    ):
        load = BackgroundLoad(testbed)
        rounds = [members.average(AverageCommand(number, codec)) for number, codec in enumerate(codecs)]
        return rounds, load.cores()


class _Members:
    """A process on each host, connected to its neighbours on entering the context."""

    def __init__(self, testbed: Testbed, rings: Rings, folder: Path) -> None:
        self._testbed, self._rings = testbed, rings
        _make_identities(folder, list(testbed.hosts))
        self._processes = {name: self._start(name, folder / name) for name in testbed.hosts}

    def __enter__(self) -> _Members:
        for name, process in self._processes.items():
            _send(process, self._assignment(name))
        for process in self._processes.values():
            _receive(process, str)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
            if kind is None:
                process.wait(TIMEOUT_S)

    def average(self, command: AverageCommand) -> Round:
        before, cpu_before_s = self._used()
        for process in self._processes.values():
            _send(process, command)
        results = {name: _receive(process, RoundResult) for name, process in self._processes.items()}
        after, cpu_s = self._used()
        wire = {name: after[name] - before[name] for name in after}
        return Round(command.codec, results, wire, cpu_s - cpu_before_s)

    def _used(self) -> tuple[dict[str, int], float]:
        """The bytes that each host has sent, and the CPU seconds of all."""
        usage = {name: self._testbed.usage(name) for name in self._processes}
        cpu_s = sum(used.cpu_s for used in usage.values()) + self._testbed.forwarder_cpu_s()
        return {name: used.sent_bytes for name, used in usage.items()}, cpu_s

    def _start(self, name: str, folder: Path) -> Process:
        command = [sys.executable, "-m", "benchmarks.rings.wan_member", str(folder)]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return self._testbed.hosts[name].run(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1)

    def _assignment(self, name: str) -> RingAssignment:
        mine = {number: ring for number, ring in enumerate(self._rings.rings) if name in ring.members}
        return RingAssignment(
            members={number: ring.members for number, ring in mine.items()},
            num_elements={number: ring.segment.parameter_bytes // 4 for number, ring in mine.items()},
            addresses={host: self._testbed.address(host) for host in self._processes},
            piece_elements=PIECE_ELEMENTS,
        )


def _make_identities(folder: Path, names: Sequence[str]) -> None:
    now, valid = datetime.now(UTC), timedelta(days=1)
    authority = make_authority("bench", now=now, valid=valid)
    for name in names:
        key = make_key()
        certificate = authority.sign(make_request(key, name), name, now=now, valid=valid)
        save_identity(folder / name, key, certificate, authority.certificate_pem)


def _send(process: Process, message: msgspec.Struct) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(message).decode() + "\n")
    process.stdin.flush()


def _receive(process: Process, kind: type[T]) -> T:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], TIMEOUT_S)[0]:
        raise RuntimeError(f"{process.host} printed nothing within {TIMEOUT_S:g} s")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.host} exited with code {process.wait()}")
    return msgspec.json.decode(line, type=kind)


if __name__ == "__main__":
    main()
