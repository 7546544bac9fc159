"""Measures the pages in Chromium: first paint, delay of updates, memory after a long run."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from benchmarks.control.child import Child
from benchmarks.dashboard.chromium import Page, chromium

_LIVE = "document.querySelector('#connection').dataset.state === 'live'"
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_WATCH = """
window.marks = {};
const look = () => {
  for (const [text] of document.querySelector('main').innerText.matchAll(/mark \\d+/g)) marks[text] ??= Date.now();
};
const options = {subtree: true, childList: true, characterData: true};
new MutationObserver(look).observe(document.querySelector('main'), options);
0"""
_DRAW_S = 120.0


@dataclass(frozen=True)
class PageTimes:
    """Seconds: first paints, and delays from an event to its sentence on the page."""

    paints_s: list[float]
    delays_s: list[float]

    @property
    def paint_s(self) -> float:
        return statistics.median(self.paints_s)

    @property
    def delay_p95_s(self) -> float:
        return sorted(self.delays_s)[int(0.95 * (len(self.delays_s) - 1))]


def measure_times(service: Child, link: str, *, loads: int, marks: int) -> PageTimes:
    return asyncio.run(_measure_times(service, link, loads, marks))


async def _measure_times(service: Child, link: str, loads: int, marks: int) -> PageTimes:
    async with chromium() as page:
        await page.size(1280, 900)
        paints_s = []
        for _ in range(loads):
            await page.open("about:blank")
            await page.open(link)
            paints_s.append(await page.until(_PAINT) / 1000)
        await page.until(_LIVE, _DRAW_S)
        await page.run(_WATCH)
        delays_s = [await _delay_s(page, service, number) for number in range(marks)]
        assert page.errors == [], page.errors[:3]
    return PageTimes(paints_s, delays_s)


async def _delay_s(page: Page, service: Child, number: int) -> float:
    began_s = await asyncio.to_thread(service.request, "mark", text=f"mark {number}")
    seen_ms = await page.until(f"window.marks['mark {number}']")
    return float(seen_ms / 1000 - began_s)


@dataclass(frozen=True)
class PageMemory:
    """Megabytes after a time of a long run: of objects of the script, and of the page's process alone."""

    minutes: float
    heap_mb: float
    process_mb: float


def measure_memory(service: Child, link: str, minutes: float, log: Callable[[str], None]) -> list[PageMemory]:
    """Show the fleet and the run in turns until the long run has lasted `minutes`."""
    return asyncio.run(_measure_memory(service, link, minutes, log))


async def _measure_memory(service: Child, link: str, minutes: float, log: Callable[[str], None]) -> list[PageMemory]:
    rows: list[PageMemory] = []
    async with chromium() as page:
        await page.size(1280, 900)
        await page.open(link)
        await page.until(_LIVE, _DRAW_S)
        names = ("run", "fleet", "plan", "contributions")
        fed_s = 0.0
        while fed_s < 60 * minutes:
            await page.run(f"location.hash = '#/{names[len(rows) % len(names)]}'")
            wanted_s = 60 * minutes * (len(rows) + 1) / 6
            while (fed_s := await asyncio.to_thread(service.request, "fed")) < wanted_s - 1e-6:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
            rows.append(PageMemory(fed_s / 60, await _heap_mb(page), _renderer_mb()))
            log(f"page after {rows[-1].minutes:.0f} min: {rows[-1].process_mb:.0f} MB")
        assert page.errors == [], page.errors[:3]
    return rows


async def _heap_mb(page: Page) -> float:
    await page.call("HeapProfiler.collectGarbage")
    used = await page.call("Runtime.getHeapUsage")
    return float(used["usedSize"]) / 1e6


def _renderer_mb() -> float:
    """Memory of the page's process that it shares with no other."""
    sizes = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "--type=renderer" in process.cmdline():
                sizes.append(process.memory_full_info().uss)
        except psutil.Error:
            continue
    return float(max(sizes)) / 1e6
