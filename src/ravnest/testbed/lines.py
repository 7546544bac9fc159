"""What many hosts print, line by line, each with the name of its host before it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

__all__ = ["Lines"]

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class Lines:
    """Lines of output, each with the name of its host."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._console = Console()
        self._width = max(map(len, hosts))
        self._styles = {host: _STYLES[i % len(_STYLES)] for i, host in enumerate(hosts)}
        self._unfinished: dict[str, bytes] = {}

    def output(self, host: str, chunk: bytes) -> None:
        """Print the whole lines; the rest waits for its end. An empty chunk is the end."""
        *lines, rest = (self._unfinished.pop(host, b"") + chunk).split(b"\n")
        if chunk:
            self._unfinished[host] = rest
        elif rest:
            lines.append(rest)
        for line in lines:
            self._line(host, line.decode(errors="replace"))

    def say(self, what: str) -> None:
        self._console.print(Text(f"{'':{self._width}} * {what}", style="dim"), soft_wrap=True)

    def _line(self, host: str, line: str) -> None:
        name = Text(f"{host:{self._width}} | ", style=self._styles[host])
        self._console.print(name.append(Text.from_ansi(line.rstrip("\r"), style="none")), soft_wrap=True)
