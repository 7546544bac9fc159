"""Offsets that are added to the weights between updates; microbatches in flight keep the weights of their forward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from ravnest.graph import initialise, split, trace
from ravnest.pipeline import staleness as corrections
from ravnest.pipeline.config import TrainerConfig
from ravnest.pipeline.optimizers import SGD
from ravnest.pipeline.staleness import Correction, Corrector
from ravnest.pipeline.trainer import Trainer
from ravnest.pipeline.versions import Versions

CORRECTIONS = {
    "none": corrections.none(), "look-ahead": corrections.look_ahead(1.0), "the default": corrections.DEFAULT,
}  # fmt: skip


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_a_shift_changes_the_newest_version_and_all_later_ones(correction: Correction, delay: int) -> None:
    """With updates that do not depend on the weights, shifted weights equal plain ones plus the shift."""
    made = [Versions({"w": torch.zeros(3)}, Corrector(correction, delay)) for _ in range(2)]
    by = torch.tensor([1.0, 2.0, 3.0])
    for step in range(8):
        if step == 4:
            made[1].shift({"w": by})
        for versions in made:
            versions.update(partial(_add, float(step)))
        plain, moved = ({**v._live, "master": v.master} for v in made)
        for key in plain:
            expected = by if step >= 4 and (key == "master" or key > 4) else torch.zeros(3)
            assert torch.equal(moved[key]["w"].detach() - plain[key]["w"].detach(), expected), (step, key)


def _add(size: float, weights: dict[str, torch.Tensor]) -> None:
    weights["w"].add_(size)


def test_microbatches_in_flight_are_not_affected() -> None:
    model = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))  # noqa: E731
    batch = (torch.randn(6, 4), torch.randn(6, 1))
    (stage,) = split(trace(model, nn.functional.mse_loss, batch), ())
    config = TrainerConfig(optimizer=SGD(0.1), correction=corrections.DEFAULT)
    trainer = Trainer(stage, initialise(stage, 0), config, delay=1)
    inputs = list(batch)
    trainer.forward(0, 0, 0, inputs, 1.0)
    trainer.forward(1, 1, 0, inputs, 1.0)  # still on version 0
    trainer.backward(0, None)
    own, _ = trainer.take_gradients(0, 0)
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    by = {name: torch.full_like(tensor, 2) for name, tensor in before.items()}
    found = {name: tensor.clone() for name, tensor in trainer._buffers_before[1].items()}  # by the second forward
    trainer.shift(by)
    trainer.update(0, 0, own, None)
    trainer.backward(1, None)
    gradients, _ = trainer.take_gradients(1, 0)
    assert all(torch.isfinite(g).all() for g in gradients.values())
    mean = next(name for name in before if name.endswith("running_mean"))
    assert torch.equal(trainer.weights()[mean], found[mean] + 2)
    for name, gradient in own.items():
        assert torch.allclose(trainer.versions.master[name], before[name] - 0.1 * gradient + 2), name


def test_integer_buffers_are_rounded() -> None:
    model = lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))  # noqa: E731
    batch = (torch.randn(4, 2), torch.randn(4, 1))
    (stage,) = split(trace(model, nn.functional.mse_loss, batch), ())
    trainer = Trainer(
        stage, initialise(stage, 0), TrainerConfig(optimizer=SGD(0.1), correction=corrections.none()), delay=0
    )
    counted = next(name for name in trainer.fixed if name.endswith("num_batches_tracked"))
    trainer.shift({counted: torch.tensor(2.6)}, now=True)
    assert trainer.fixed[counted].dtype == torch.int64
    assert int(trainer.fixed[counted]) == 3
