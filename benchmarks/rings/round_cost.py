"""What a round of averaging costs a node's processor, part by part, with nothing else to do.

Two members in this process average vectors as large as the model over TLS, as two clusters do. The seconds are those
of the processor, for one member and one round: what training goes without while it shares its core.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.pipeline.__main__ import identities, tls_pair
from benchmarks.report import Report
from ravnest.averaging.averager import Averager
from ravnest.averaging.codec import Floats, is_finite
from ravnest.averaging.contribution import Contribution, digest
from ravnest.averaging.ring import RingSpec
from ravnest.averaging.session import AttemptKey
from ravnest.protocol.averaging import Message
from ravnest.transport.link import LinkConfig

__all__ = ["add_costs"]

NUM_ELEMENTS = 9_750_000  # of the model in `rings_slowdown_job`
PIECE_ELEMENTS = int(0.05 * 12.5e6 / 4)  # as the coordinator has it for 100 Mbit/s
_NAMES = ("node-a", "node-b")
_DEADLINE_S = 60.0
_REPEATS = 5


def add_costs(report: Report) -> None:
    """A row for each, the costs of sums within that of the engine being taken off it."""
    vector, result = (np.ones(NUM_ELEMENTS, np.float32) for _ in range(2))
    sums_s = _seconds(lambda: _add_half(vector, result))
    parts = {
        "snapshot: a copy of the weights": _seconds(lambda: np.copyto(result, vector)),
        "sums: share, add, look whether finite": sums_s,
        "TLS, frames and threads": _engine_seconds() - sums_s,
        "digest of the average": _seconds(lambda: digest(result)),
        "correction: average - snapshot": _seconds(lambda: np.subtract(vector, result, out=result)),
        "shift: weights + correction": _seconds(lambda: np.add(vector, result, out=vector)),
    }
    for what, seconds in {**parts, "all of these": sum(parts.values())}.items():
        report.rows.append({"what a round costs a node": what, "processor, ms": 1e3 * seconds})


def _seconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(_REPEATS):
        began_s = time.process_time()
        work()
        found.append(time.process_time() - began_s)
    return statistics.median(found)


def _add_half(vector: Floats, result: Floats) -> None:
    """What a member of two does for the half that it adds up and the half that it sends."""
    for lo in range(0, vector.size, PIECE_ELEMENTS):
        own, piece = vector[lo : lo + PIECE_ELEMENTS], result[lo : lo + PIECE_ELEMENTS]
        np.multiply(own, np.float32(0.5), out=piece)
        is_finite(piece)
        if lo < vector.size // 2:
            np.add(own, piece, out=piece)


def _engine_seconds() -> float:
    """Of one member in a whole round."""
    with tempfile.TemporaryDirectory() as folder:
        links = tls_pair(*identities(Path(folder)), LinkConfig(headers=Message))
    vectors = [np.full(NUM_ELEMENTS, 1.0 + i, np.float32) for i in range(2)]
    results = [np.empty_like(vector) for vector in vectors]
    with Averager({_NAMES[1]: links[0]}) as left, Averager({_NAMES[0]: links[1]}) as right:

        def take_part(averaging: Averager, i: int, number: int) -> None:
            spec = RingSpec(id=0, members=_NAMES, me=_NAMES[i], weights=(1.0, 1.0), chunk_elements=PIECE_ELEMENTS)
            averaging.run(AttemptKey(number, 0), [Contribution(spec, vectors[i], results[i])], deadline_s=_DEADLINE_S)

        def both(number: int) -> None:
            other = threading.Thread(target=take_part, args=(right, 1, number))
            other.start()
            take_part(left, 0, number)
            other.join()

        numbers = iter(range(1, _REPEATS + 1))
        seconds = _seconds(lambda: both(next(numbers)))
    if not all(np.array_equal(result, np.full(NUM_ELEMENTS, 1.5, np.float32)) for result in results):
        raise RuntimeError("the two did not average")
    return seconds / 2


if __name__ == "__main__":
    found = Report("what a round of averaging costs a node")
    add_costs(found)
    found.finish(None)
