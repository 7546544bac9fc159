"""Events for users, made of the many events of a coordinator."""

from __future__ import annotations

from typing import Any

import msgspec

from ravnest.config import TrainingConfig
from ravnest.coordinator import events as on
from ravnest.core.metrics import StageMetrics
from ravnest.core.units import UNLIMITED_BYTES
from ravnest.events import NodeJoinedEvent, NodeLostEvent, RoundEvent, StepEvent, TrainingEvent
from ravnest.protocol.control import NodeProfile
from ravnest.protocol.peer import PeerAddresses
from ravnest.run.event_feed import EventFeed, plain_config


def connected(name: str, held: int = 0, memory_bytes: int = 10**9) -> on.NodeConnected:
    profile = NodeProfile(memory_bytes=memory_bytes, gflops=1.0)
    return on.NodeConnected(0.0, name, profile, PeerAddresses(()), "", held)


def feed_of(*events: on.Event) -> list[TrainingEvent]:
    seen: list[TrainingEvent] = []
    feed = EventFeed("x", seen.append)
    for event in events:
        feed.handle_event(event)
    return seen


def nodes(*events: on.Event) -> list[Any]:
    """(node, joined or lost, whether it is back or connected)."""
    shown: list[Any] = []
    for event in feed_of(*events):
        if isinstance(event, NodeJoinedEvent):
            shown.append((event.node, "joined", event.is_back))
        elif isinstance(event, NodeLostEvent):
            shown.append((event.node, "lost", event.is_connected))
    return shown


def test_a_node_joins_once_and_is_lost_once() -> None:
    lost = on.NodeLost(0.0, "ann", "silent", False)
    again = [connected("ann", held=3)]  # its connection broke, and it never stopped training
    assert nodes(connected("ann"), *again, *again) == [("ann", "joined", False)]
    assert nodes(lost) == [], "of a node that was not there"
    gone = [("ann", "joined", False), ("ann", "lost", False)]
    assert nodes(connected("ann"), lost, lost) == gone
    assert nodes(connected("ann"), lost, connected("ann", held=3)) == [*gone, ("ann", "joined", True)]
    assert nodes(connected("ann"), on.NodeKicked(0.0, "ann", "rude")) == gone


def test_a_node_whose_stage_fails_is_back_when_it_computes_again() -> None:
    failed, ready = on.NodeQuarantined(0.0, "ann", "its worker was killed"), on.NodeReady(0.0, "c2", "ann")
    down = [("ann", "joined", False), ("ann", "lost", True)]
    assert nodes(connected("ann"), ready) == down[:1]
    assert nodes(connected("ann"), failed, failed, ready, ready) == [*down, ("ann", "joined", True)]
    lost = on.NodeLost(0.0, "ann", "silent", False)
    assert nodes(connected("ann"), failed, lost, ready, connected("ann")) == [*down, ("ann", "joined", True)]


def test_memory_without_a_limit_is_zero() -> None:
    joined = feed_of(connected("ann"), connected("bob", memory_bytes=UNLIMITED_BYTES))
    assert [event.memory_bytes for event in joined if isinstance(event, NodeJoinedEvent)] == [10**9, 0]


def test_a_round_ends_once() -> None:
    def rounds(*events: on.Event) -> list[tuple[int, tuple[str, ...], float, str]]:
        return [(e.number, e.clusters, e.took_s, e.reason) for e in feed_of(*events) if isinstance(e, RoundEvent)]

    started = [on.RoundStarted(0.0, 4, attempt, {"a": 0.5, "b": 0.5}, "") for attempt in (0, 1)]
    done = on.RoundCommitted(0.0, 4, 1, 2.5)
    assert rounds(*started, done, on.RoundClosed(0.0, 4)) == [(4, ("a", "b"), 2.5, "")]
    assert rounds(*started, on.RoundClosed(0.0, 4, "ann was lost")) == [(4, ("a", "b"), 0.0, "ann was lost")]
    assert rounds(on.RoundClosed(0.0, 4, "of an earlier start")) == []


def test_staleness_is_that_of_the_step_and_of_the_worst_stage() -> None:
    feed = EventFeed("x", lambda event: None)
    first = [StageMetrics(stage=0, staleness={0: 4, 1: 4}), StageMetrics(stage=1, staleness={0: 8})]
    then = [StageMetrics(stage=0, staleness={0: 4, 1: 8, 2: 4}), StageMetrics(stage=1, staleness={0: 16})]
    assert feed._staleness("c1", first) == 0.5
    assert feed._staleness("c1", then) == 1.5
    assert feed._staleness("c1", then) == 0.0, "nothing was applied"
    assert feed._staleness("c2", first) == 0.5, "another cluster begins anew"


def test_the_configuration_is_plain_and_has_no_passwords() -> None:
    config = TrainingConfig(
        checkpoint_to="s3://key:secret@host/bucket?token=hidden", run_dir="runs/x", track="tensorboard"
    )
    plain = plain_config(config)
    assert plain["checkpoint_to"] == "s3://host/bucket"
    assert plain["run_dir"] == "runs/x"
    assert list(plain["track"]) == ["tensorboard"]
    assert plain["correction"] == msgspec.structs.asdict(config.correction), "fields with defaults included"
    assert StepEvent.__struct_fields__[:3] == ("step", "samples", "seconds")
