"""A port takes what its neighbour may send and closes the link on everything else, before memory is taken."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ravnest.core.errors import FrameError
from ravnest.core.messages import Backward, Data, Evaluate, Forward, Lend, Norm, Return
from ravnest.graph import State, Value
from ravnest.net.link import LinkConfig
from ravnest.net.memory import memory_pair
from ravnest.node.ports import Port
from ravnest.runtime.freight import Freight, as_bytes
from ravnest.runtime.loop import Inbox

X = Value("x", "float32", ((1, 0), 4), grad=True)
TIED = State("s0", "tokens.weight", "float32", (5, 4))


class Neighbour:
    """A port that listens for forward messages, and the raw link at its other end."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.raw, ours = memory_pair(LinkConfig(headers=Data), capacity_bytes=2**20)
        freights: dict[type, Freight] = {Forward: Freight([X], "none", max_batch=8)}
        self.port = Port(ours, self.inbox, freights, [TIED], self.errors.put, 10.0)
        self.port.start()

    def send(self, header: Any, *tensors: torch.Tensor) -> None:
        self.raw.send(header, [as_bytes(t) for t in tensors], deadline_s=5.0)


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    made = Neighbour()
    yield made
    made.port.close(flush_s=0.0)
    made.raw.close()


def test_what_is_expected_arrives_in_order(neighbour: Neighbour) -> None:
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
        (Backward(0, 3), [torch.zeros(3, 4)]),  # comes from the other side
        (Forward(0, 9), [torch.zeros(9, 4)]),  # more samples than agreed
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
def test_everything_else_closes_the_link(neighbour: Neighbour, header: Any, tensors: list[torch.Tensor]) -> None:
    neighbour.send(header, *tensors)
    assert isinstance(neighbour.errors.get(timeout=5.0), FrameError)
    assert neighbour.inbox.take(0) is None


def test_what_is_put_is_sent(neighbour: Neighbour) -> None:
    neighbour.port.put(Backward(3, 2), [torch.full((2, 4), 7.0)])
    received = torch.zeros(2, 4)
    header = neighbour.raw.receive(lambda header, lengths: [as_bytes(received)], deadline_s=5.0)
    assert header == Backward(3, 2)
    assert torch.equal(received, torch.full((2, 4), 7.0))
