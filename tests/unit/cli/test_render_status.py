"""`ravnest status --watch` at real sizes of terminals: it fits, breaks no word, shows clusters and events."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from ravnest.cli.render_status import status_page
from ravnest.coordinator.status import (
    ClusterStatus,
    EventStatus,
    LeaseStatus,
    LinkStatus,
    NodeStatus,
    RunStatus,
    StageStatus,
)
from ravnest.protocol.control import NodeProfile

LEASES = LeaseStatus(granted=9, settled=5, repeated=1, outstanding=2, returned=1)
PROFILE = NodeProfile(
    memory_bytes=4 * 10**9, gflops=12.5, threads=2, up_bytes_per_s=2.5e6, down_bytes_per_s=1e7, latency_s=0.02
)
SENTENCE = "cluster c1 failed: the worker of its node was killed by signal 9, and another one is started"
SIZES = [(100, 30), (80, 24), (60, 20), (200, 60)]


def node(name: str, state: str, cluster: str | None = None, stage: int | None = None, **fields: object) -> NodeStatus:
    given = {
        "profile": PROFILE,
        "last_seen_age_s": 0.4,
        "activity": "training: 12 updates, 3.1 microbatches/s",
        **fields,
    }
    return NodeStatus(name=name, state=state, reason="because", cluster=cluster, stage=stage, **given)  # type: ignore[arg-type]


def cluster(name: str, members: list[str], phase: str = "training") -> ClusterStatus:
    stages = tuple(
        StageStatus(name=member, stage=i, is_ready=phase == "training", updates=1200 + i, bubble=0.1)
        for i, member in enumerate(members)
    )
    return ClusterStatus(
        id=name, phase=phase, generation=1, reason="all members are ready", plan_reason="", stages=stages, cuts=(),
        planned_samples_per_s=12.0, samples_per_s=0.08 if phase == "training" else None, loss=2.5, leases=LEASES,
    )  # fmt: skip


def status(nodes: list[NodeStatus], clusters: list[ClusterStatus], **fields: object) -> RunStatus:
    given: dict[str, object] = {
        "run": "char-gpt", "release": "0.1.0", "now_s": 1e9, "uptime_s": 4000.0, "end_reason": None, "steps_done": 1234,
        "steps": 100_000, "generation": 3, "leases": LEASES, "relay": (), "num_rejected": 0, "rejections": (),
        "events": tuple(EventStatus(at_s=1e9 + i, text=f"{SENTENCE} ({i})") for i in range(40)), **fields,
    }  # fmt: skip
    return RunStatus(nodes=tuple(nodes), clusters=tuple(clusters), **given)  # type: ignore[arg-type]


def shown(found: RunStatus, width: int, height: int | None) -> list[str]:
    console = Console(width=width, height=height or 10_000, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(status_page(found, width, height))
    return captured.get().splitlines()


def home_fleet() -> RunStatus:
    link = LinkStatus(peer="barn", kind="relayed", reason="both NATs", hint="")
    nodes = [node(name, "training", "c1", i, links=(link,)) for i, name in enumerate(["attic", "barn", "cellar"])]
    nodes += [node(f"old-{i}", "gone", profile=None, activity="") for i in range(14)]
    nodes += [node("spare", "free", activity="free: kept as a spare"), node("banned", "kicked")]
    return status(nodes, [cluster("c1", ["attic", "barn", "cellar"])])


def large_fleet() -> RunStatus:
    nodes = [node(f"pc-{i:04}", "training", f"c1{i // 8}", i % 8) for i in range(2000)]
    nodes += [node(f"gone-{i:04}", "gone") for i in range(3000)]
    return status(nodes, [cluster(f"c1{i}", [f"pc-{i * 8 + k:04}" for k in range(8)]) for i in range(250)])


def names_in_other_scripts() -> RunStatus:
    names = ["ноутбук", "書斎のパソコン", "حاسوب", "o" * 63]
    events = tuple(
        EventStatus(at_s=1e9, text=f"{name} has a direct link to the other side of the town") for name in names
    )
    return status(
        [node(name, "training", "c1", i) for i, name in enumerate(names)], [cluster("c1", names)], events=events
    )


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("make", [home_fleet, large_fleet, names_in_other_scripts])
def test_it_fits_and_shows_everything(make: object, width: int, height: int) -> None:
    lines = shown(make(), width, height)  # type: ignore[operator]
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "1,234 of 100,000 batches trained, 1 sample every" in text or "samples/s" in lines[0]
    assert re.search(r"^c1\d*\s+training", text, re.M), "a cluster"
    assert len([line for line in lines if re.match(r"\d\d:\d\d:\d\d  ", line)]) >= 1, "an event"
    assert lines[-1].strip(), "the room is used"


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_events_are_whole_words(width: int, height: int) -> None:
    lines = shown(home_fleet(), width, height)
    first = next(i for i, line in enumerate(lines) if re.match(r"\d\d:\d\d:\d\d  ", line))
    words = {word for line in lines[first:] for word in line[10:].split()}
    assert words <= {*SENTENCE.split(), *(f"({i})" for i in range(40))}
    assert "(39)" in lines[-1], "the newest"


def test_nodes_that_are_gone_are_one_line() -> None:
    lines = shown(home_fleet(), 100, 30)
    (line,) = [line for line in lines if "old-" in line]
    assert line == "not here: 14 gone (old-0, old-1, old-2, old-3, old-4, ...); 1 removed (banned)"
    assert "\n".join(lines).count("attic") == 1


def test_a_large_fleet_says_what_it_leaves_out() -> None:
    text = "\n".join(shown(large_fleet(), 100, 30))
    left = re.findall(r"and ([\d,]+) more (clusters|nodes)", text)
    assert [what for _, what in left] == ["clusters", "nodes"]
    shown_nodes = len(re.findall(r"^pc-\d{4} ", text, re.M))
    assert int(left[1][0].replace(",", "")) == 2000 - shown_nodes
    assert len(shown(large_fleet(), 140, None)) > 2000, "without a height nothing is left out"


def test_a_run_without_a_cluster_has_no_speed() -> None:
    waiting = "waiting for nodes, 1 of 2 are connected"
    lines = shown(status([node("attic", "free")], [cluster("c1", ["attic"], "ended")], waiting=waiting), 100, 30)
    assert lines[:2] == [
        "char-gpt: 1,234 of 100,000 batches trained, up 66.7 m", f"paused, no cluster trains: {waiting}",
    ]  # fmt: skip
    assert "samples/s" not in "\n".join(lines)
    ended = shown(status([], [], end_reason="the run has ended", events=()), 100, 30)
    assert ended[1] == "ended: the run has ended"
