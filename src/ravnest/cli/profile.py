"""`ravnest profile`: measure this machine, or serve the measurement of the line to it.

A profile is printed as a table, as an entry of a node file (TOML), or as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ravnest.cli.options import Debug, Device
from ravnest.core.config import require
from ravnest.core.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_rate
from ravnest.transport.address import Address, parse_address

if TYPE_CHECKING:
    from ravnest.profiling.machine import MachineLimits, MachineProfile

__all__ = ["as_node", "as_table", "profile", "profile_json"]


def profile(
    job: Annotated[Path | None, typer.Argument(help="Job file, to measure the speed on its model.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory limit, such as 4GB. Without it: what is free now.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Processor cores to use. Without it: all of them.")] = None,
    max_upload: Annotated[
        str | None, typer.Option(metavar="RATE", help="Upload limit, such as '10 Mbit/s'. Without it: no limit.")
    ] = None,
    peer: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Measure the line to a machine that runs --serve.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="[HOST]:PORT", help="Serve measurements with --peer, until Ctrl-C.")
    ] = None,
    device: Device = "auto",
    name: Annotated[str | None, typer.Option(help="Name of this machine. Without it: its host name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Measure this machine: memory, training speed, and the line to another machine. Takes under 15 seconds.

    Example: `ravnest profile --serve :7710` on one machine, `ravnest profile --peer attic:7710` on another
    """
    require(peer is None or serve is None, "give --peer or --serve, not both")
    upload_bytes_per_s = None if max_upload is None else parse_rate(max_upload)
    if serve is not None:
        asyncio.run(_serve(parse_address(serve, default_host="0.0.0.0"), upload_bytes_per_s))
        return
    memory_bytes = None if memory is None else parse_bytes(memory)
    address = None if peer is None else parse_address(peer)
    from ravnest.profiling.machine import MachineLimits

    limits = MachineLimits(memory_bytes=memory_bytes, threads=threads, max_upload_bytes_per_s=upload_bytes_per_s)
    measured = _measure(limits, name, job, address, device)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if as_json:
        console.print(profile_json(measured), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(as_table(measured))
    console.print("for the node file:\n", highlight=False)
    console.print(as_node(measured), markup=False, highlight=False, soft_wrap=True)


async def _serve(address: Address, max_upload_bytes_per_s: float | None) -> None:
    from ravnest.profiling.bandwidth import serve_line

    console = Console()

    def log(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    async with serve_line(address, max_upload_bytes_per_s=max_upload_bytes_per_s, log=log) as (_, port):
        limit = "" if max_upload_bytes_per_s is None else f", sending at most {format_rate(max_upload_bytes_per_s)}"
        log(f"serving at port {port}{limit}; on the other machine: ravnest profile --peer THIS-MACHINE:{port}")
        await asyncio.Event().wait()


def _measure(
    limits: MachineLimits, name: str | None, job: Path | None, peer: Address | None, device: str
) -> MachineProfile:
    """Measure, with progress on stderr."""
    from ravnest.profiling.machine import measure_machine

    progress = Console(stderr=True)
    with progress.status("measuring") as status:

        def report(what: str) -> None:
            status.update(f"measuring: {what}")
            if not progress.is_terminal:
                progress.print(f"measuring: {what}", highlight=False, markup=False)

        workload = None
        if job is not None:
            from ravnest.run.job_file import load_job

            report("the job's program")
            workload = load_job(job).job.workload()
        return measure_machine(limits, name=name, job=workload, peer=peer, device=device, report=report)


def profile_json(profile: MachineProfile) -> str:
    return json.dumps(asdict(profile), indent=1)


def as_table(profile: MachineProfile) -> Table:
    table = Table(title=profile.name, show_header=False)
    table.add_row("usable memory", _memory(profile))
    if profile.host_memory_bytes:
        table.add_row("memory of the PC", format_bytes(profile.host_memory_bytes))
    table.add_row("training speed", f"{_speed(profile)} GFLOP/s, on {profile.measured_on}")
    if profile.low_precision:
        table.add_row(f"speed in {profile.low_precision}", f"{profile.low_precision_gflops:.1f} GFLOP/s")
    named = f"{profile.device} ({profile.device_name})" if profile.device_name else profile.device
    table.add_row("device", f"{named}, {profile.threads} thread{'s' if profile.threads > 1 else ''}")
    for name, value in _line(profile).items():
        table.add_row(name, value or "not measured: give --peer HOST:PORT")
    return table


def as_node(profile: MachineProfile) -> str:
    """Return an entry of a node file; values that were not measured are comments for the owner to fill in."""
    lines = ["[[node]]", f'name = "{profile.name}"', f'memory = "{_memory(profile)}"']
    lines.append(f"speed = {_speed(profile)}  # GFLOP/s")
    lines += [f'{name} = "{value}"' if value else f'# {name} = "?"' for name, value in _line(profile).items()]
    return "\n".join(lines)


def _line(profile: MachineProfile) -> dict[str, str | None]:
    line, limit = profile.line, profile.max_upload_bytes_per_s
    if line is None:
        return {"up": format_rate(limit) if limit else None, "down": None, "latency": None}
    return {
        "up": format_rate(line.up_bytes_per_s),
        "down": format_rate(line.down_bytes_per_s),
        "latency": format_seconds(line.latency_s),
    }


def _speed(profile: MachineProfile) -> str:
    return f"{profile.gflops:.1f}" if profile.gflops >= 10 else f"{profile.gflops:.3f}"


def _memory(profile: MachineProfile) -> str:
    """Return the usable memory, rounded down."""
    size, unit = (
        (profile.memory_bytes / 1e9, "GB") if profile.memory_bytes >= 1e9 else (profile.memory_bytes / 1e6, "MB")
    )
    return f"{floor(size * 10) / 10:g} {unit}"
