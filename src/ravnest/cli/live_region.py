"""A region at the bottom of a terminal that is drawn again a few times a second, below what was printed before.

After a change of the terminal's size the terminal has wrapped old lines again, so the screen is cleared and a header is
printed again. When the region is closed, its lines are erased and the cursor is shown, whatever the reason.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.cells import set_cell_size
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

__all__ = ["EventLines", "LiveRegion", "event_lines", "is_live", "wrap"]

_INTERVAL_S = 0.25
_CLOSE_S = 5.0


def is_live(console: Console, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a console can show a live region: a terminal that can move its cursor, and no CI job."""
    is_terminal = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
    return is_terminal and environment.get("CI", "").lower() not in ("1", "true", "yes")


class LiveRegion:
    """Draws `render()` until it is closed. `header()` prints the lines above it, at the start and after a resize."""

    def __init__(
        self, console: Console, render: Callable[[], RenderableType], header: Callable[[], None] = lambda: None
    ) -> None:
        self._console, self._render, self._header = console, render, header
        self._live = self._new_live()
        self._size = console.size
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_drawing, name="terminal", daemon=True)
        self.is_open = False

    def open(self) -> None:
        """Print the header and start to draw."""
        self._header()
        self._live.start()
        self.is_open = True
        self._thread.start()

    def print(self, text: str) -> None:
        """Print a line above the region."""
        with self._lock:
            self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Erase the region."""
        if not self.is_open:
            return
        self._closing.set()
        self._thread.join(_CLOSE_S)
        with self._lock:
            self.is_open = False
            self._live.stop()

    def _new_live(self) -> Live:
        return Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def _keep_drawing(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            with self._lock:
                if not self._closing.is_set():
                    self._draw()

    def _draw(self) -> None:
        if self._console.size != self._size:
            self._size = self._console.size
            self._live.stop()
            self._console.clear()
            self._header()
            self._live = self._new_live()
            self._live.start()
        self._live.update(self._render(), refresh=True)


class EventLines:
    """The last events with their times; frequent repetitions of one text are shown once."""

    def __init__(self, now_s: Callable[[], float] = time.time, limit: int = 50) -> None:
        self._now_s = now_s
        self._events: deque[tuple[float, str]] = deque(maxlen=limit)

    def __bool__(self) -> bool:
        return bool(self._events)

    def add(self, text: str) -> None:
        if not self._events or self._events[-1][1] != text:
            self._events.append((self._now_s(), text))

    def lines(self, width: int, count: int) -> list[str]:
        """Return at most `count` lines with the newest events, the newest last."""
        return event_lines(list(self._events), width, count)


def event_lines(events: Sequence[tuple[float, str]], width: int, count: int) -> list[str]:
    """Return at most `count` lines of whole words with the newest events, the newest last.

    Only the newest event may be cut off. Widths are those of a terminal, where some letters take two columns.
    """
    found: list[str] = []
    for at_s, text in reversed(events):
        room = count - len(found)
        if room <= 0:
            break
        stamp, indent = time.strftime("%H:%M:%S  ", time.localtime(at_s)), " " * 10
        lines = wrap(text, width - len(indent), room + bool(found))
        if len(lines) > room:
            break
        found = [*((indent if i else stamp) + line for i, line in enumerate(lines)), *found]
    return found


def wrap(text: str, width: int, count: int) -> list[str]:
    """Return a text as at most `count` lines of whole words; an ellipsis shows that there was more."""
    width = max(width, 10)
    lines = [line.plain.rstrip() for line in Text(text).wrap(_PLAIN, width)]
    if len(lines) > count:
        lines = [*lines[: count - 1], set_cell_size(lines[count - 1], width - 1).rstrip() + "…"]
    return lines


_PLAIN = Console(width=1000, color_system=None)
