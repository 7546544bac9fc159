"""A command in a real pseudo-terminal, and the screen that a user would see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence

import pyte

TIMEOUT_S = 120.0


class Terminal:
    """A context in which a command runs; its screen is that of an emulator of the given size."""

    def __init__(self, command: Sequence[str], width: int, height: int, environment: Mapping[str, str] = {}) -> None:
        self._command, self._environment = command, {**environment, "TERM": "xterm-256color", "CI": ""}
        self.screen = pyte.HistoryScreen(width, height, history=1000)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        self.code: int | None = None

    def __enter__(self) -> Terminal:
        self._pid, self._descriptor = pty.fork()
        if self._pid == 0:
            inherited = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
            os.execvpe(self._command[0], list(self._command), {**inherited, **self._environment})
        self._set_size()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.code is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._descriptor)

    @property
    def text(self) -> str:
        """The lines of the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def is_cursor_visible(self) -> bool:
        return not self.screen.cursor.hidden

    def wait_for(self, predicate: Callable[[str], bool], what: str) -> str:
        """Return the screen once the predicate holds for its text."""
        deadline = time.monotonic() + TIMEOUT_S
        while not predicate(self.text):
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.text}"
            assert self._read(), f"the command ended before {what}:\n{self.text}"
        return self.text

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(height, width)
        self._set_size()

    def echo(self, is_on: bool) -> None:
        """Switch the echo of written lines."""
        settings = termios.tcgetattr(self._descriptor)
        settings[3] = settings[3] | termios.ECHO if is_on else settings[3] & ~termios.ECHO
        termios.tcsetattr(self._descriptor, termios.TCSANOW, settings)

    def write(self, line: str) -> None:
        """Write a line to the standard input of the command."""
        os.write(self._descriptor, f"{line}\n".encode())

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)

    def finish(self) -> int:
        """Wait for the end of the command; returns its exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._read():
            assert time.monotonic() < deadline, f"it does not end:\n{self.text}"
        _, status = os.waitpid(self._pid, 0)
        self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def _set_size(self) -> None:
        size = struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, size)

    def _read(self) -> bool:
        """Read what the command has written; false at its end."""
        ready, _, _ = select.select([self._descriptor], [], [], 0.1)
        data = b"" if ready else None
        if ready:
            with contextlib.suppress(OSError):  # the command has ended
                data = os.read(self._descriptor, 65536)
        if data:
            self.output += data
            self._stream.feed(data)
        return data != b""
