"""A part of a benchmark in a process of its own: asked over its standard input, it answers, a line of JSON each."""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

import psutil

Handlers = Mapping[str, Callable[..., Awaitable[Any]]]

_PATIENCE_S = 300.0
_MAX_LINE_BYTES = 1 << 24


class Child:
    """The side that asks; a context that ends the process."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._seen = psutil.Process(self._process.pid)
        self._name = module

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20.0 if error is None else 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, what: str, **given: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **given}) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _PATIENCE_S)[0]:
            raise RuntimeError(f"{self._name} did not answer {what!r} within {_PATIENCE_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended when it was asked for {what!r}")
        return json.loads(line)

    def memory_bytes(self) -> int:
        """What the process holds of this machine's memory."""
        return int(self._seen.memory_info().rss)


async def answer(handlers: Handlers) -> None:
    """The side that is asked: answers until nobody can ask any more."""
    reader = asyncio.StreamReader(_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        asked = json.loads(line)
        print(json.dumps(await handlers[asked.pop("what")](**asked)), flush=True)
