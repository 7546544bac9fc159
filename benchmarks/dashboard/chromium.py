"""Drives a headless Chromium by the DevTools protocol; needs nothing but the browser itself."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

_START_S = 60.0
_CALL_S = 60.0
_WAIT_S = 60.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--mute-audio", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip


class Page:
    """A page. `errors` are its console errors, uncaught exceptions and violations of its policy."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = asyncio.Event()

    async def listen(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                self._answers.pop(content["id"]).set_result(content)
            else:
                self._handle(content["method"], content["params"])

    def _handle(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:800])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded.set()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(_CALL_S):
            content = await answer
        assert "error" not in content, f"{method}: {content['error']}"
        result: dict[str, Any] = content["result"]
        return result

    async def open(self, url: str) -> None:
        """Load an address as if it were typed; with another fragment of the same page only that changes."""
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(_CALL_S):
            await self._loaded.wait()

    async def run(self, script: str) -> Any:
        """Return the value of an expression."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, json.dumps(result["exceptionDetails"])[:2000]
        return result["result"].get("value")

    async def until(self, script: str, timeout_s: float = _WAIT_S) -> Any:
        """Wait until an expression is true; return its value."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (value := await self.run(script)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            text = await self.run("document.body.innerText.slice(0, 2000)")
            raise AssertionError(f"not true within {timeout_s:g} s: {script}\nThe page:\n{text}") from None
        return value

    async def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    async def scheme(self, name: str) -> None:
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def screenshot(self, *, whole: bool = False) -> bytes:
        """Return the page as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def other_hosts(self, host: str) -> list[str]:
        """Requests that went anywhere else than to `host`."""
        return [url for url in self.requests if not url.startswith("data:") and urlsplit(url).netloc != host]


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """Start a browser with one empty page, and end it. All its files are in a directory that is removed."""
    assert CHROMIUM is not None
    directory = Path(tempfile.mkdtemp(prefix="ravnest-chromium-"))
    profile, temporary = directory / "profile", directory / "tmp"
    temporary.mkdir()
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            address = await _address(session, profile)
            async with session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
                listening.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        await _remove(directory)


async def _remove(directory: Path) -> None:
    """Remove a directory; processes of the browser may end a moment after it, and write until then."""
    async with asyncio.timeout(_START_S):
        while os.path.exists(directory):  # noqa: ASYNC240
            shutil.rmtree(directory, ignore_errors=True)
            await asyncio.sleep(0.05)


async def _address(session: aiohttp.ClientSession, profile: Path) -> str:
    """Return the WebSocket address of the browser's first page."""
    port_file = profile / "DevToolsActivePort"
    async with asyncio.timeout(_START_S):
        while True:
            with contextlib.suppress(OSError, aiohttp.ClientError, IndexError, StopIteration):
                port = port_file.read_text().split()[0]
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = await answer.json()
                return str(next(one["webSocketDebuggerUrl"] for one in pages if one["type"] == "page"))
            await asyncio.sleep(0.1)
