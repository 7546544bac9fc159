"""Each term of a stage's memory."""

from __future__ import annotations

import pytest

from ravnest.planner import MemoryModel, StageShare, stage_memory

SHARE = StageShare(
    parameter_bytes=100,
    borrowed_bytes=10,
    fixed_bytes=7,
    saved_bytes=1000,
    work_bytes=30,
    input_bytes=20,
    link_bytes=60,
)


def test_averaging_keeps_copies_of_the_parameters() -> None:
    plain, rings = (stage_memory(SHARE, 3, MemoryModel(ring_copies=copies)) for copies in (0, 2))
    assert rings.total - plain.total == rings.rings == 2 * SHARE.parameter_bytes


def test_bases_are_not_packed() -> None:
    plain, rotated = (stage_memory(SHARE, 3, MemoryModel(mode="compact", basis_ratio=ratio)) for ratio in (0.0, 4.0))
    assert rotated.total - plain.total == rotated.optimizer - plain.optimizer == 4 * SHARE.parameter_bytes


def test_every_term() -> None:
    memory = stage_memory(SHARE, 3, MemoryModel(base_bytes=5, correction_copies=1))
    assert (memory.base, memory.fixed, memory.work) == (5, 7, 30)
    assert memory.weights == 100 * 3 + 10 * 2
    assert memory.gradients == 110
    assert memory.optimizer == 200
    assert memory.activations == 3000
    assert memory.links == 120
    assert memory.total == 5 + 7 + 30 + 320 + 110 + 200 + 3000 + 120
    assert str(memory).startswith("3.8 kB: activations 3.0 kB, weights 320 B, optimizer 200 B")


@pytest.mark.parametrize(
    ("model", "depth", "versions"),
    [
        (MemoryModel(synchronous=True), 5, 1),
        (MemoryModel(correction_copies=0), 5, 2),
        (MemoryModel(), 5, 4),
        (MemoryModel(correction_copies=1), 5, 3),
        (MemoryModel(accumulate=5, correction_copies=0), 5, 2),
        (MemoryModel(accumulate=1, correction_copies=0), 5, 5),
        (MemoryModel(accumulate=2, correction_copies=0), 5, 3),
        (MemoryModel(accumulate=1), 1, 4),
    ],
)
def test_versions(model: MemoryModel, depth: int, versions: int) -> None:
    assert model.weight_copies(depth) == versions


@pytest.mark.parametrize(
    ("model", "bytes_each"),
    [
        (MemoryModel(mode="exact"), 28),
        (MemoryModel(mode="exact", gradient_copies=2), 32),
        (MemoryModel(mode="compact"), 16.1),
        (MemoryModel(mode="compact", gradient_copies=2), 18.1),
        (MemoryModel().in_mode("small"), 8.03),
        (MemoryModel(gradient_copies=2).in_mode("small"), 8.03),
        (MemoryModel(mode="exact", synchronous=True), 16),
    ],
)
def test_bytes_per_parameter(model: MemoryModel, bytes_each: float) -> None:
    """Of AdamW with the default correction, as the module's table says."""
    memory = stage_memory(StageShare(parameter_bytes=4_000_000), 3, model)
    assert (memory.weights + memory.gradients + memory.optimizer) / 1e6 == pytest.approx(bytes_each, abs=0.05)


def test_mode_small_is_synchronous_and_recomputes() -> None:
    small = MemoryModel(mode="compact").in_mode("small")
    assert small.synchronous
    assert small.recompute
    with pytest.raises(ValueError, match="must be synchronous"):
        MemoryModel(mode="small")


def test_recomputation_keeps_inputs_and_one_microbatch() -> None:
    assert stage_memory(SHARE, 4, MemoryModel(recompute=True)).activations == 4 * 20 + 1000


def test_a_window_that_waits_keeps_its_gradient() -> None:
    assert stage_memory(SHARE, 4, MemoryModel(gradient_copies=2)).gradients == 220


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": -1},
        {"optimizer_ratio": -1.0},
        {"basis_ratio": -1.0},
        {"gradient_copies": 0},
        {"link_buffers": -1},
        {"base_bytes": -1},
    ],
)
def test_invalid_values_are_rejected(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        MemoryModel(**changes)  # type: ignore[arg-type]


def test_a_stage_has_a_microbatch_in_flight() -> None:
    with pytest.raises(ValueError, match=">= 1"):
        stage_memory(SHARE, 0, MemoryModel())
