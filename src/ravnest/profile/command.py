"""`ravnest profile` as a person asks for it, in words and flags."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from ..core.config import config, parse_bytes, require
from ..core.units import format_rate, parse_rate
from .answer import Answerer
from .line import parse_address
from .machine import Offer, measure_machine
from .mix import Workload
from .show import as_json as json_of
from .show import as_node, as_table

__all__ = ["Asked", "answer_peers", "measured"]


@config
class Asked:
    """What was asked for, as it was written."""

    memory: str | None = None
    threads: int | None = None
    max_upload: str | None = None
    peer: str | None = None
    serve: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        require(self.peer is None or self.serve is None, "give --peer or --serve, not both")

    @property
    def offer(self) -> Offer:
        return Offer(
            memory_bytes=None if self.memory is None else parse_bytes(self.memory),
            threads=self.threads,
            max_upload_bytes_per_s=None if self.max_upload is None else parse_rate(self.max_upload),
        )


def measured(asked: Asked, job: Callable[[], Workload] | None, *, as_json: bool) -> None:
    """Measure and print; `job` makes the work that the speed is measured on."""
    offer, peer = asked.offer, None if asked.peer is None else parse_address(asked.peer)
    progress = Console(stderr=True)
    with progress.status("measuring") as status:

        def report(what: str) -> None:
            status.update(f"measuring: {what}")
            if not progress.is_terminal:
                progress.print(f"measuring: {what}", highlight=False, markup=False)

        work = None
        if job is not None:
            report("the job's program")
            work = job()
        found = measure_machine(offer, name=asked.name, job=work, peer=peer, report=report)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if as_json:
        console.print(json_of(found), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(as_table(found))
    console.print("for the node file:\n", highlight=False)
    console.print(as_node(found), markup=False, highlight=False, soft_wrap=True)


def answer_peers(asked: Asked) -> None:
    """Answer those who measure the line to here, until Ctrl-C."""
    assert asked.serve is not None
    console, limit = Console(), asked.offer.max_upload_bytes_per_s

    def say(what: str) -> None:
        console.print(what, markup=False, highlight=False)

    answerer = Answerer(parse_address(asked.serve, default_host="0.0.0.0"), max_upload_bytes_per_s=limit, say=say)
    pace = "" if limit is None else f", sending at most {format_rate(limit)}"
    say(f"answering at port {answerer.address[1]}{pace}; on the other machine: "
        f"ravnest profile --peer THIS-MACHINE:{answerer.address[1]}")  # fmt: skip
    answerer.serve()
