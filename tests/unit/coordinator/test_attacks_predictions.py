"""Predictions over the coordinator's port: who may request them, what they may contain, and hostile answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ravnest.errors import RequestRejected
from ravnest.node.client import Client, unverified_context
from ravnest.protocol.commands import PredictionReport
from ravnest.protocol.control import Disconnect, StageReport
from ravnest.transport.ticket import Ticket
from tests.unit.coordinator.attacks import RunningCoordinator, coordinator_with_nodes, run

pytestmark = pytest.mark.timeout(60)


async def predict(server: RunningCoordinator, body: Any, token: str | None = None) -> Any:
    token = Ticket.parse(server.ticket).token if token is None else token
    async with Client(server.address, unverified_context()) as client:
        headers = {"Authorization": f"Bearer {token}"}
        return msgspec.json.decode(await client.ask("POST", "/v1/predict", json=body, headers=headers))


async def requested(server: RunningCoordinator) -> asyncio.Task[Any]:
    """A request whose prompt has been sent to the first stage."""
    task = asyncio.create_task(predict(server, {"tokens": [1, 2, 3]}))
    feeder = server.cluster_of("bob").feeder
    await server.until(lambda: bool(feeder._evaluating), "the prompt is sent")
    return task


def test_the_answer_of_the_last_stage_is_returned(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            task = await requested(server)
            await server.nodes_by_name["bob"].send(StageReport(1, PredictionReport(0, ((7, 3),), ((1.5, None),))))
            assert await task == {"tokens": [7, 3], "scores": [1.5, None]}
            await server.train()

    run(test())


@pytest.mark.parametrize(
    ("tokens", "scores"),
    [((), ()), (((1,),), ()), (((1,), (2,)), ((0.0,), (0.0,))), (((),), ((),)), (((1, 2),), ((0.0,),)),
     (((1,) * 65,), ((0.0,) * 65,))],
)  # fmt: skip
def test_a_malformed_answer_ends_the_session(tmp_path: Path, tokens: Any, scores: Any) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            task = await requested(server)
            bob = server.nodes_by_name["bob"]
            await bob.send(StageReport(1, PredictionReport(0, tokens, scores)))
            assert "does not belong to one prompt" in (await bob.receive(Disconnect)).reason
            task.cancel()
            bob.received.clear()

    run(test())


def test_answers_that_nobody_requested_are_rejected(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            ann, bob = (server.nodes_by_name[name] for name in ("ann", "bob"))
            report = StageReport(1, PredictionReport(0, ((1,),), ((0.0,),)))
            await ann.send(report)
            assert "only the last stage" in (await ann.receive(Disconnect)).reason
            await bob.send(report)
            assert "was not sent" in (await bob.receive(Disconnect)).reason
            for node in (ann, bob):
                node.received.clear()

    run(test())


def test_only_holders_of_a_ticket_may_ask_and_one_at_a_time(tmp_path: Path) -> None:
    async def test() -> None:
        async with coordinator_with_nodes(tmp_path) as server:
            with pytest.raises(RequestRejected, match="token"):
                await predict(server, {"tokens": [1]}, token="x" * 32)
            for body in ({}, {"tokens": "abc"}, {"tokens": [1.5]}, {"tokens": [1], "more": 1}, [1]):
                with pytest.raises(RequestRejected):
                    await predict(server, body)
            task = await requested(server)
            with pytest.raises(RequestRejected, match="another request"):
                await predict(server, {"tokens": [1]})
            server.coordinator.running.end_cluster(server.cluster_of("bob").id, "test", is_lost=True)
            with pytest.raises(RequestRejected, match="ended before it answered"):
                await task

    run(test())
