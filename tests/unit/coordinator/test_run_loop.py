"""The run loop: silent nodes are lost for any heartbeat interval, and an error in it ends the run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from ravnest.coordinator.http.limits import HttpTimeouts
from ravnest.coordinator.journal import replay
from ravnest.coordinator.policy.membership import MembershipPolicy
from ravnest.coordinator.service import CoordinatorConfig, CoordinatorServer
from ravnest.protocol.control import Disconnect, NodeWork
from ravnest.run.coordinator_thread import CoordinatorThread
from tests.unit.coordinator.attacks import FakeRequester, coordinator_with_nodes, run, running_coordinator
from tests.unit.coordinator.clients import FakeNode


@pytest.mark.parametrize("heartbeat_s", [0.2, 1.0])
def test_a_node_that_disconnects_and_is_silent_is_lost(heartbeat_s: float, tmp_path: Path) -> None:
    async def test() -> None:
        async with running_coordinator(
            tmp_path, membership=MembershipPolicy(heartbeat_s=heartbeat_s, settle_s=0.05)
        ) as server:
            async with await server.node("ann"):
                await server.wait_for_log("ann connected")
            await server.wait_for_log("ann", f"no message for 3 heartbeats of {heartbeat_s:g} s")

    run(test())


@pytest.mark.parametrize("is_over", [True, False])
def test_nodes_are_told_that_the_run_has_ended_also_if_they_reconnect_then(is_over: bool, tmp_path: Path) -> None:
    async def test() -> None:
        timeouts = HttpTimeouts(reconnect_s=20.0, goodbye_s=0.4)
        membership = MembershipPolicy(heartbeat_s=20.0)
        async with running_coordinator(tmp_path, timeouts=timeouts, membership=membership) as server:
            given = NodeWork(batches=3)
            server.coordinator.contribution_of = {"ann": given}.get
            async with await server.node("bob") as bob:
                await server.wait_for_log("bob connected")
            await server.wait_for_log("the connection to bob ended")
            async with await server.node("ann") as ann:
                await server.wait_for_log("ann connected")
                ending = asyncio.create_task(server.service.close("all steps are done", is_over=is_over))
                told = await ann.receive(Disconnect)
                assert told == Disconnect("all steps are done", is_run_over=is_over, contribution=given)
                if is_over:
                    async with FakeNode(bob.identity, server.address) as again:
                        assert await again.receive(Disconnect) == Disconnect("all steps are done", is_run_over=True)
                    ending.cancel()
            await asyncio.wait([ending])
            for name in ("ann", "bob"):  # nobody is waited for at the end of the test
                server.coordinator.remove_node(name, "the test is over", is_voluntary=True)

    run(test())


def test_scarce_batches_go_to_clusters_in_turn(tmp_path: Path) -> None:
    """Each cluster could train more than there is; the first must not get all of it."""

    async def test() -> None:
        async with coordinator_with_nodes(tmp_path, ("ann", "bob", "cid", "dot")) as server:
            state = server.coordinator.state
            await server.until(lambda: len(state.training_clusters()) == 2, "two clusters train")
            clusters = [cluster.plan.id for cluster in state.training_clusters()]
            before = [state.leases.counts_of(cluster).settled for cluster in clusters]
            for _ in range(10):
                await server.train(1)
            more = [state.leases.counts_of(c).settled - count for c, count in zip(clusters, before, strict=True)]
            assert more == [5, 5]

    run(test())


def test_an_error_in_the_run_loop_ends_the_run_and_leaves_it_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CoordinatorConfig(directory=tmp_path / "keys", host="127.0.0.1", port=0)

    def fail() -> None:
        raise KeyError("unexpected")

    def make() -> CoordinatorServer:
        service = CoordinatorServer(config, FakeRequester(tmp_path), run="test")
        monkeypatch.setattr(service.coordinator.averaging, "tick", fail)
        return service

    def serve() -> None:
        with CoordinatorThread(tmp_path / "keys", make) as serving:
            until_s = time.monotonic() + 60
            while time.monotonic() < until_s:
                serving.check()
                time.sleep(0.01)

    with pytest.raises(KeyError, match="unexpected") as raised:
        serve()
    assert "--resume" in raised.value.__notes__[0]
    state, problems = replay(tmp_path / "keys" / "journal")
    assert (state.run, state.end_reason, problems) == ("test", None, [])
