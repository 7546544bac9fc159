"""Prints the output of many hosts line by line, each line after the name of its host."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

__all__ = ["HostOutput"]

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class HostOutput:
    """Splits the output of hosts into lines and prints them."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._console = Console()
        self._width = max(map(len, hosts))
        self._styles = {host: _STYLES[i % len(_STYLES)] for i, host in enumerate(hosts)}
        self._unfinished: dict[str, bytes] = {}

    def output(self, host: str, chunk: bytes) -> None:
        """Print the complete lines; an unfinished line waits for its end. An empty chunk is the end of the output."""
        *lines, rest = (self._unfinished.pop(host, b"") + chunk).split(b"\n")
        if chunk:
            self._unfinished[host] = rest
        elif rest:
            lines.append(rest)
        for line in lines:
            self._print(host, line.decode(errors="replace"))

    def note(self, text: str) -> None:
        """Print a line of the testbed itself."""
        self._console.print(Text(f"{'':{self._width}} * {text}", style="dim"), soft_wrap=True)

    def _print(self, host: str, line: str) -> None:
        name = Text(f"{host:{self._width}} | ", style=self._styles[host])
        self._console.print(name.append(Text.from_ansi(line.rstrip("\r"), style="none")), soft_wrap=True)
