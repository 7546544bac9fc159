"""A profile for people (a table), for programs (JSON), and for a node file (TOML to paste)."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import floor

from rich.table import Table

from ..core.units import format_rate, format_seconds
from .machine import Profile

__all__ = ["as_json", "as_node", "as_table"]


def as_json(profile: Profile) -> str:
    return json.dumps(asdict(profile), indent=1)


def as_table(profile: Profile) -> Table:
    table = Table(title=profile.name, show_header=False)
    table.add_row("memory to lend", _memory(profile))
    table.add_row("training speed", f"{_speed(profile)} GFLOP/s, on {profile.measured_on}")
    table.add_row("device", f"{profile.device}, {profile.threads} thread{'s' if profile.threads > 1 else ''}")
    for name, value in _line(profile).items():
        table.add_row(name, value or "not measured: give --peer HOST:PORT")
    return table


def as_node(profile: Profile) -> str:
    """An entry of a node file; what is not known is left for its owner to fill in."""
    lines = ["[[node]]", f'name = "{profile.name}"', f'memory = "{_memory(profile)}"']
    lines.append(f"speed = {_speed(profile)}  # GFLOP/s")
    lines += [f'{name} = "{value}"' if value else f'# {name} = "?"' for name, value in _line(profile).items()]
    return "\n".join(lines)


def _line(profile: Profile) -> dict[str, str | None]:
    line, limit = profile.line, profile.max_upload_bytes_per_s
    if line is None:
        return {"up": format_rate(limit) if limit else None, "down": None, "latency": None}
    return {
        "up": format_rate(line.up_bytes_per_s),
        "down": format_rate(line.down_bytes_per_s),
        "latency": format_seconds(line.latency_s),
    }


def _speed(profile: Profile) -> str:
    return f"{profile.gflops:.1f}" if profile.gflops >= 10 else f"{profile.gflops:.3f}"


def _memory(profile: Profile) -> str:
    """Rounded down: what is promised must be there."""
    size, unit = (
        (profile.memory_bytes / 1e9, "GB") if profile.memory_bytes >= 1e9 else (profile.memory_bytes / 1e6, "MB")
    )
    return f"{floor(size * 10) / 10:g} {unit}"
