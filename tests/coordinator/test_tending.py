"""Deciding goes on: however short a beat is, who is silent is lost; and if deciding fails, the run does not hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ravnest.coordinator.decide import Wishes
from ravnest.coordinator.journal import replay
from ravnest.coordinator.service import Service, ServiceConfig
from ravnest.serving import Serving
from tests.coordinator.attacks import Giver, at_work, house, run

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("beat_s", [0.2, 1.0])
def test_who_breaks_off_and_is_silent_is_lost(beat_s: float, tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path, wishes=Wishes(beat_s=beat_s, wait_s=0.05)) as found:
            async with await found.guest("ann"):
                await found.says("ann connected")
            await found.says("ann", f"not heard for 3 beats of {beat_s:g} s")

    run(test())


def test_every_cluster_has_its_turn_where_data_are_scarce(tmp_path: Path) -> None:
    """Each would train more than there is: else the first to be asked would have all of it."""

    async def test() -> None:
        async with at_work(tmp_path, ("ann", "bob", "cid", "dot")) as found:
            state = found.coordinator.state
            await found.until(lambda: len(state.training_clusters()) == 2, "two clusters train")
            clusters = [cluster.plan.id for cluster in state.training_clusters()]
            before = [state.leases.of(cluster).settled for cluster in clusters]
            for _ in range(10):
                await found.trains(1)
            more = [state.leases.of(c).settled - count for c, count in zip(clusters, before, strict=True)]
            assert more == [5, 5]

    run(test())


def test_what_goes_wrong_in_deciding_ends_the_run_and_leaves_it_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServiceConfig(directory=tmp_path / "keys", host="127.0.0.1", port=0)

    def confused() -> None:
        raise KeyError("nobody thought of this")

    def make() -> Service:
        service = Service(config, Giver(tmp_path), run="test")
        monkeypatch.setattr(service.coordinator.averaging, "look", confused)
        return service

    def serve() -> None:
        with Serving(tmp_path / "keys", make) as serving:
            until_s = time.monotonic() + 10
            while time.monotonic() < until_s:
                serving.check()
                time.sleep(0.01)

    with pytest.raises(KeyError, match="nobody thought of this") as raised:
        serve()
    assert "--resume" in raised.value.__notes__[0]
    state, problems = replay(tmp_path / "keys" / "journal")
    assert (state.run, state.ended, problems) == ("test", None, [])
