"""Runs a part of a benchmark in a child process, with requests and answers as lines of JSON over stdin and stdout."""

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

_TIMEOUT_S = 300.0
_MAX_LINE_BYTES = 1 << 24


class Child:
    """The client side; a context that ends the process."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._psutil = psutil.Process(self._process.pid)
        self._module = module

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

    def request(self, name: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, **arguments}) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _TIMEOUT_S)[0]:
            raise RuntimeError(f"{self._module} did not answer {name!r} within {_TIMEOUT_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} exited at the request {name!r}")
        return json.loads(line)

    def memory_bytes(self) -> int:
        """Resident memory of the process."""
        return int(self._psutil.memory_info().rss)


async def serve(handlers: Handlers) -> None:
    """The server side: answer requests until stdin is closed."""
    reader = asyncio.StreamReader(_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        arguments = json.loads(line)
        print(json.dumps(await handlers[arguments.pop("name")](**arguments)), flush=True)
