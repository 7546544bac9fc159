"""A stage link accepts what its neighbour may send, and closes on everything else before allocating memory."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ravnest.errors import FrameError
from ravnest.graph import StateSpec, Value
from ravnest.pipeline.loop import Inbox
from ravnest.pipeline.tensor_codec import TensorCodec, as_bytes
from ravnest.protocol.pipeline import Backward, Data, Evaluate, Forward, Lend, Norm, Return
from ravnest.transport.link import LinkConfig
from ravnest.worker.stage_runner import StageLink
from tests.unit.transport.memory import memory_pair

X = Value("x", "float32", ((1, 0), 4), grad=True)
TIED = StateSpec("s0", "tokens.weight", "float32", (5, 4))


class Neighbour:
    """A stage link that receives forward messages, and the raw link at its other end."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.raw, ours = memory_pair(LinkConfig(headers=Data), capacity_bytes=2**20)
        codecs: dict[type, TensorCodec] = {Forward: TensorCodec([X], "none", max_batch=8)}
        self.link = StageLink(ours, self.inbox, codecs, [TIED], self.errors.put, 10.0)
        self.link.start()

    def send(self, header: Any, *tensors: torch.Tensor) -> None:
        self.raw.send(header, [as_bytes(t) for t in tensors], deadline_s=60.0)


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    made = Neighbour()
    yield made
    made.link.close(flush_s=0.0)
    made.raw.close()


def test_expected_messages_arrive_in_order(neighbour: Neighbour) -> None:
    x = torch.arange(12.0).view(3, 4)
    neighbour.send(Forward(0, 3, 0.5), x)
    neighbour.send(Lend(1, 0, 2, ("tokens.weight",)), torch.ones(5, 4))
    neighbour.send(Norm(7, 2.5))
    neighbour.send(Evaluate(1, 2), x[:2])
    arrived = [neighbour.inbox.take(5.0) for _ in range(4)]
    assert [header for header, _ in arrived] == [
        Forward(0, 3, 0.5), Lend(1, 0, 2, ("tokens.weight",)), Norm(7, 2.5), Evaluate(1, 2),
    ]  # fmt: skip
    assert torch.equal(arrived[0][1][0], x)
    assert torch.equal(arrived[1][1][0], torch.ones(5, 4))


@pytest.mark.parametrize(
    ("header", "tensors"),
    [
        (Backward(0, 3), [torch.zeros(3, 4)]),  # sent by the other neighbour only
        (Forward(0, 9), [torch.zeros(9, 4)]),  # larger batch than configured
        (Forward(0, 3), [torch.zeros(3, 5)]),  # another size
        (Forward(0, 3), [torch.zeros(3, 4)] * 2),  # one buffer too many
        (Forward(0, 3), []),
        (Evaluate(0, -3), [torch.zeros(3, 4)]),
        (Lend(0, 0, 1, ("other",)), [torch.zeros(5, 4)]),
        (Lend(0, 0, 1, ("tokens.weight",)), [torch.zeros(6, 4)]),
        (Return(0, 0, 1, ("tokens.weight", "tokens.weight")), [torch.zeros(5, 4)]),
        (Norm(0, 1.0), [torch.zeros(1)]),
    ],
    ids=repr,
)
def test_unexpected_messages_close_the_link(neighbour: Neighbour, header: Any, tensors: list[torch.Tensor]) -> None:
    neighbour.send(header, *tensors)
    assert isinstance(neighbour.errors.get(timeout=60.0), FrameError)
    assert neighbour.inbox.take(0) is None


def test_queued_messages_are_sent(neighbour: Neighbour) -> None:
    neighbour.link.put(Backward(3, 2), [torch.full((2, 4), 7.0)])
    received = torch.zeros(2, 4)
    header = neighbour.raw.receive(lambda header, lengths: [as_bytes(received)], deadline_s=60.0)
    assert header == Backward(3, 2)
    assert torch.equal(received, torch.full((2, 4), 7.0))
