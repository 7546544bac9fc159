"""Shows a made-up agent in the live view of `ravnest join`, driven by lines; started by `test_live_view.py`."""

from __future__ import annotations

import sys

from rich.console import Console

from ravnest.cli.live_join import JoinOutput
from ravnest.core.metrics import StageMetrics
from ravnest.node.console import AgentConsole
from ravnest.protocol.commands import StepReport
from ravnest.protocol.control import Assignment, Blob, StageReport

ASSIGNMENT = Assignment(
    generation=7, cluster="c1", stage=1, count=3, file=Blob("0" * 64, 1), config=Blob("0" * 64, 1),
)  # fmt: skip


def main() -> None:
    lines = JoinOutput(Console())
    console = AgentConsole(lines.write)
    lines.open(console)
    try:
        console.log("measuring this PC")
        for order in sys.stdin:
            word, _, rest = order.strip().partition(" ")
            match word:
                case "assign":
                    console.assigned(ASSIGNMENT, "")
                case "train":
                    metrics = StageMetrics(stage=1, updates=int(rest), microbatches=8 * int(rest), memory_bytes=10**8)
                    console.reported(StageReport(7, StepReport(metrics)))
                case "free":
                    console.assigned(None, rest)
                case "fail":
                    raise ValueError(rest)
    finally:
        lines.close()


if __name__ == "__main__":
    main()
