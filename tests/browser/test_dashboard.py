"""The pages in a real browser, with a real local run: live data, a killed worker, a restart, accessibility.

Runs where Chromium is installed; the accessibility rules (axe-core) also need npm and its registry, once.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ravnest
from benchmarks.dashboard.chromium import CHROMIUM, Page, chromium
from ravnest.core.host import data_directory
from ravnest.dashboard.report import write_report
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.run.metrics import ProgressView
from tests.unit.coordinator.attacks import run
from tests.unit.dashboard.served import served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]

AXE = "4.11.0"  # of axe-core
PAGES = ("run", "fleet", "plan", "contributions", "access", "node/node-0")
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
CONFIG = GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2, dropout=0.0, tied=False)
OVERFLOWING = """[...document.querySelectorAll('main .share, main .value, main dd, main h2')]
  .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""
STATE = "document.querySelector('#connection').dataset.state"
RECORD = """
window.seen = {least: 4, texts: []};
new MutationObserver(() => {
  seen.least = Math.min(seen.least, document.querySelectorAll('.stage.training').length);
  seen.texts.push(document.querySelector('#live').textContent);
}).observe(document.body, {subtree: true, childList: true, characterData: true});
0"""
HOSTILE = ['<img src=x onerror="window.hacked=1">', "</script><script>window.hacked=1</script>", "узел-7", "a/b c?#"]


class Text:
    """Batches until `is_over`, so that the run lasts as long as the test needs it."""

    is_over = False

    def __iter__(self) -> Iterator[Any]:
        for batch in batches(library_text(100_000), 12, CONFIG.context, 0):
            if self.is_over:
                return
            time.sleep(0.05)  # the browser needs the processor too
            yield batch


class View(ProgressView):
    def __init__(self) -> None:
        self.link, self.has_link = "", threading.Event()

    def dashboard(self, link: str) -> None:
        self.link = link
        self.has_link.set()


class LocalRun:
    """A local run of four nodes in two clusters, in a thread of this process."""

    def __init__(self, folder: Path) -> None:
        self._text, self.view, self._folder = Text(), View(), folder
        self._thread = threading.Thread(target=self._train)
        self.error: BaseException | None = None

    def _train(self) -> None:
        job = ravnest.Job(
            model=lambda: GPT(CONFIG), loss=next_token_loss, data=iter(self._text), validation=[next(iter(Text()))],
            optimizer=ravnest.AdamW(3e-3),
        )  # fmt: skip
        config = ravnest.TrainingConfig(
            on="local:4", clusters=2, threads=1, run_dir=self._folder, validate_every=10, average_every=48,
            steps=100_000, memory="400MB", verify=False,
        )  # fmt: skip
        try:
            job.train(config, show=self.view)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> LocalRun:
        self._thread.start()
        assert self.view.has_link.wait(120), self.error
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
        self._thread.join(120)
        assert not self._thread.is_alive()
        assert self.error is None

    def end(self) -> None:
        self._text.is_over = True

    def kill_worker(self) -> None:
        workers = [worker for server in psutil.Process().children() for worker in server.children()]
        next(worker for worker in workers if "chrom" not in worker.name()).kill()


@pytest.fixture(autouse=True)
def no_files_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The browser leaves no files in the directory for temporary files."""
    with tempfile.TemporaryDirectory(prefix="ravnest-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert [name for name in os.listdir(folder) if "chrom" in name.lower()] == []


@pytest.fixture(scope="session")
def axe() -> str | None:
    """The accessibility rules, fetched once into the user's data directory; None where the registry is not reached."""
    folder = data_directory() / "test-cache"
    script = folder / f"axe-{AXE}.js"
    npm = shutil.which("npm")
    if not script.is_file():
        if npm is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [npm, "pack", "--silent", f"axe-core@{AXE}"], cwd=folder, capture_output=True, timeout=120,
        )  # fmt: skip
        archive = folder / f"axe-core-{AXE}.tgz"
        if done.returncode != 0 or not archive.is_file():
            return None
        shutil.unpack_archive(archive, folder / f"axe-{AXE}", filter="data")
        os.replace(folder / f"axe-{AXE}" / "package" / "axe.min.js", script)
        shutil.rmtree(folder / f"axe-{AXE}")
        archive.unlink()
    return script.read_text()


async def violations(page: Page, axe: str) -> list[str]:
    """Accessibility rules that the page breaks. The rules run beside the page, whose policy does not apply to them."""
    await page.run(f"{axe};0")
    found = await page.run(
        f"axe.run({{runOnly: {json.dumps(TAGS)}}}).then((r) => r.violations.map((v) => "
        "`${v.id}: ${v.help} ${v.nodes.slice(0, 3).map((n) => n.html).join(' ')}`))"
    )
    return list(found)


async def show(page: Page, name: str) -> None:
    await page.run(f"location.hash = '#/{name}'")
    await page.until(f"location.hash === '#/{name}' && document.querySelector('main h1') !== null")


def test_every_page_shows_a_live_run_and_a_death(tmp_path: Path, axe: str | None) -> None:
    async def test(local: LocalRun) -> None:
        async with chromium() as page:
            await page.size(1280, 900)
            await page.open(local.view.link)
            await page.until(f"{STATE} === 'live'")
            assert "token" not in await page.run("location.href"), "the token is not kept in the address"
            await page.until("document.querySelector('figure path.line') !== null")
            assert await page.run("document.querySelector('.run-name').textContent") == "run"
            for name in PAGES:
                await check(page, name, axe)
            await check_keyboard(page)
            await show(page, "fleet")
            await page.until("document.querySelectorAll('.stage.training').length === 4")
            await page.run(RECORD)
            local.kill_worker()
            await page.until("seen.least < 4 && seen.texts.some((text) => text.includes('failed: '))", 20)
            await page.until("document.querySelectorAll('.stage.training').length === 4")
            await show(page, "contributions")
            await page.until("document.querySelectorAll('tbody tr').length === 4")
            assert page.errors == []
            assert page.other_hosts(local.view.link.split("/")[2]) == []
            local.end()
            await page.until(f"{STATE} === 'ended'")
            assert "Sum" in await page.run("document.querySelector('main').innerText"), "the last values stay"

    with LocalRun(tmp_path / "run") as local:
        asyncio.run(test(local))
    write_report(tmp_path / "run", tmp_path / "report.html")
    asyncio.run(check_report(tmp_path / "report.html"))


async def check(page: Page, name: str, axe: str | None) -> None:
    """Look at a page on a desktop and a phone, in light and dark."""
    await show(page, name)
    await page.until("!/No values yet|No batch is settled/.test(document.querySelector('main').innerText)")
    for scheme, width in (("light", 1280), ("dark", 390)):
        await page.scheme(scheme)
        await page.size(width, 844, is_phone=width < 500)
        assert await page.run("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than {width}"
        assert await page.run(OVERFLOWING) == [], f"text on {name} is wider than its place at {width}"
        if axe:
            found = await violations(page, axe)
            assert found == [], f"{name}, {scheme}"
    await page.size(1280, 900)


async def check_keyboard(page: Page) -> None:
    """The chart reads its values by the arrow keys, and links are reached by the tabulator."""
    await show(page, "run")
    await page.run("document.querySelector('svg.chart').focus()")
    for _ in range(3):
        for kind in ("rawKeyDown", "keyUp"):
            await page.call("Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft")
    assert "step" in await page.run("document.querySelector('#live').textContent")
    await page.run("document.querySelector('.skip').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        await page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert await page.run("document.activeElement.getAttribute('href')") == "#/run"


async def check_report(path: Path) -> None:
    """A report shows the same pages from its file, under its own policy."""
    async with chromium() as page:
        await page.open(path.as_uri())
        for name in PAGES:
            if name != "access":
                await show(page, name)
                await page.until("!/No values yet|No batch is settled/.test(document.querySelector('main').innerText)")
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


def test_a_page_reconnects_and_shows_hostile_names_as_text(tmp_path: Path) -> None:
    async def test() -> None:
        async with chromium() as page:
            async with served(tmp_path) as server:
                server.connect(*HOSTILE)
                await page.open(server.dashboard.link)
                await page.until(f"{STATE} === 'live'")
                await show(page, "fleet")
                names = await page.until("[...document.querySelectorAll('.others .name')].map((e) => e.textContent)")
                assert sorted(names) == sorted(HOSTILE)
                await page.run("document.querySelector('.others .name a').click()")
                await page.until(f"{json.dumps(HOSTILE)}.includes(document.querySelector('h1').textContent)")
                await server.service.abort()  # as if the coordinator were killed
                await page.until(f"{STATE} === 'lost'")
                assert "trying again" in await page.run("document.querySelector('#connection').textContent")
            async with served(tmp_path) as server:
                server.connect("newcomer")
                await page.until(f"{STATE} === 'live'")
                await page.until("document.querySelector('#live').textContent === 'connected again'")
                await show(page, "fleet")
                await page.until("document.querySelector('.others').innerText.includes('newcomer')")
                assert not await page.run("window.hacked")
                await page.open(f"{server.dashboard.link}/node/newcomer")  # as `ravnest join` prints it
                await page.until("document.querySelector('h1').textContent === 'newcomer'")
                assert await page.run("location.hash") == "#/node/newcomer", "the token is not in the history"
                await page.open(server.origin + "/#token=wrong")
                await page.until(f"{STATE} === 'denied'")
        expected = ("ERR_CONNECTION", "ERR_INCOMPLETE", "401")  # of requests while the coordinator was away
        assert [text for text in page.errors if not any(part in text for part in expected)] == []

    run(test())


def test_pages_of_a_run_that_waits_say_so(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path) as server, chromium() as page:
            await page.open(server.dashboard.link)
            await page.until(f"{STATE} === 'live'")
            for name in ("run", "fleet", "plan"):
                await show(page, name)
                await page.until(
                    "document.querySelector('main').innerText.includes('waiting for 2 more nodes, 0 connected')"
                )
            server.connect("ann")
            await page.until(
                "document.querySelector('main').innerText.includes('waiting for 1 more node, 1 connected')"
            )
            for step in (1, 2, 3):
                server.dashboard.history.add_line(
                    {"step": step, "cluster": "c1", "loss": 1, "seconds": step, "samples": 1}
                )
            await show(page, "run")
            await page.until("document.querySelector('[aria-label^=Loss] path.line') !== null")
            texts = await page.run(
                "[...document.querySelectorAll('[aria-label^=Loss] .tick')].map((t) => t.textContent)"
            )
            assert [text for text in texts if text in ("1", "2", "3")].count("2") == 1, "each step once"

    run(test())


def test_rates_are_those_of_windows_not_of_neighbours(tmp_path: Path) -> None:
    """Two steps that are reported at the same moment are no peak."""

    async def test() -> None:
        async with served(tmp_path) as server, chromium() as page:
            server.connect("ann")
            server.plan("c1", "ann")
            stage = {"stage": 0, "updates": 1, "busy_s": 1.0, "idle_s": 1.0}
            for i, seconds in enumerate((1.0, 1.001, 1.002, *(1.0 + 0.1 * k for k in range(1, 100)))):
                counters = {**stage, "microbatches": i + 1, "sent_bytes": 10**6 * (i + 1)}
                server.dashboard.history.add_line({
                    "step": i + 1, "cluster": "c1", "loss": 1.0, "seconds": seconds, "samples": 10, "stages": [counters]
                })  # fmt: skip
            await page.open(server.dashboard.link)
            await page.until(f"{STATE} === 'live'")
            ticks = "[...document.querySelectorAll('[aria-label^=\"%s\"] .tick')].map((t) => t.textContent)"
            await page.until("document.querySelectorAll('path.line').length > 1")
            assert "1,000" not in await page.run(ticks % "Samples per second")
            await show(page, "node/ann")
            shown = await page.until(f"(() => {{ const t = {ticks % 'Traffic'}; return t.length > 2 && t; }})()")
            assert not [text for text in shown if text.startswith(("100 ", "500 "))], shown

    run(test())


def test_a_thousand_nodes_are_drawn(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, interval_s=0.5) as server, chromium() as page:
            names = [f"node-{i:04}" for i in range(1000)]
            server.connect(*names)
            for i in range(0, 960, 8):
                server.plan(f"c{i:04}", *names[i : i + 8])
            await page.open(server.dashboard.link)
            await page.until(f"{STATE} === 'live'")
            await show(page, "fleet")
            await page.until("document.querySelectorAll('.stage').length === 960")
            assert await page.run("document.querySelectorAll('.others li').length") == 40
            server.connect("newcomer")
            await page.until("document.querySelector('.others').textContent.includes('newcomer')")
            await show(page, "plan")
            await page.until("document.querySelector('main').innerText.includes('The first 12 of 120 clusters')")
            assert await page.run("document.querySelectorAll('main table').length") == 12
            assert page.errors == []

    run(test())
