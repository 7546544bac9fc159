"""Shows a made-up run in the live view, driven by lines of the standard input; started by `test_live_view.py`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from ravnest.cli.live_run import LiveView
from ravnest.core.metrics import StageMetrics
from ravnest.run.metrics import Progress


def cluster(name: str, num_stages: int, updates: int) -> Any:
    metrics = {
        i: StageMetrics(stage=i, updates=updates, memory_bytes=240_000_000, sent_bytes=10**6) for i in range(num_stages)
    }
    plans = [SimpleNamespace(node=f"{name}-pc-{i}") for i in range(num_stages)]
    return SimpleNamespace(
        tracker=SimpleNamespace(stages=metrics), plan=SimpleNamespace(plans=plans, samples_per_s=50.0)
    )


def main() -> None:
    view = LiveView(Console(), 1000)
    try:
        view.dashboard("http://127.0.0.1:1234/#token=" + "t" * 32)
        view.invited("rav1-" + "abcdefghij" * 9)
        view.waiting("waiting for nodes, 1 of 3 are connected")
        for i in range(40):
            view.event("LinkEstablished", f"cluster c1: pc-{i} has a direct link to pc-{i + 1} (the same network)")
        step = 0
        for order in sys.stdin:
            word, _, rest = order.strip().partition(" ")
            match word:
                case "train":
                    view.waiting("")
                    for _ in range(20):
                        step += 1
                        names = rest.split()
                        clusters = {name: cluster(name, 3, step) for name in names}
                        view.update(Progress(step=step, loss=5 - step / 50, samples=8 * step, clusters=clusters))
                case "print":
                    sys.stdout.write(f"{rest}\n")
                case "message":
                    view.message(rest)
                case "wait":
                    view.waiting(rest)
                case "fail":
                    raise ValueError(rest)
                case "end":
                    return
    finally:
        view.close()


if __name__ == "__main__":
    main()
