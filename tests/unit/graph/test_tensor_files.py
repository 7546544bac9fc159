"""A model that is too big for the memory is verified with its tensors in files, with the same result."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import zoo
from ravnest.errors import TraceError
from ravnest.graph import trace
from ravnest.graph.tensor_files import TensorFiles
from ravnest.graph.verify import verify
from tests.unit.graph.custom_gradients import Noisy

MAKERS: dict[str, Callable[[], Tensor]] = {
    "empty and drawn": lambda: nn.init.normal_(torch.empty(300, 5)),
    "drawn": lambda: torch.randn(300, 5) * 0.02,
    "transposed": lambda: torch.arange(1500.0).view(300, 5).t(),
    "part of a larger one": lambda: torch.arange(3000.0).view(300, 10)[:, 3:7] + 0,
    "bfloat16": lambda: torch.rand(1000).to(torch.bfloat16),
    "complex": lambda: torch.view_as_complex(torch.rand(500, 2)) * 1j,
    "bool": lambda: torch.rand(2000) > 0.5,
    "written in place": lambda: torch.zeros(900).add_(1).index_fill_(0, torch.tensor([3]), 7.0),
}


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_in_files_have_the_same_values_and_order(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = MAKERS[name]()
    torch.manual_seed(0)
    with TensorFiles(tmp_path, min_bytes=100):
        found = MAKERS[name]()
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", [zoo.gpt(tied=True), zoo.bert(), zoo.digits()], ids=lambda case: case.name)
def test_models_are_verified_as_in_memory(case: zoo.Case, tmp_path: Path) -> None:
    program = trace(case.build, case.loss, case.batch(4))
    leaves = program.feed(case.batch(4))
    in_files = verify(program, case.build, case.loss, leaves, seed=3, second=leaves, folder=tmp_path)
    assert in_files == verify(program, case.build, case.loss, leaves, seed=3, second=leaves)
    assert not list(tmp_path.iterdir())


class Large(nn.Module):
    """Two layers of 4 MB, each of which is kept in a file, and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 250_000), nn.Linear(250_000, 4), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(2, 4), torch.zeros(2, 4)


def test_a_wrong_program_is_rejected(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Large(Noisy.apply)

    program = trace(build, nn.functional.mse_loss, batch())
    with pytest.raises(TraceError, match="the autograd function Noisy"):
        verify(program, build, nn.functional.mse_loss, program.feed(batch()), seed=3, folder=tmp_path)


def test_weights_and_gradients_are_in_files(tmp_path: Path) -> None:
    record = tmp_path / "record"

    def relu(x: Tensor) -> Tensor:
        with record.open("a") as file:  # a list would be state of the model
            file.write(f"{Path('/proc/self/maps').read_text().count(str(tmp_path))}\n")
        return x.relu()

    def build() -> nn.Module:
        return Large(relu)

    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not list the mapped files of a process")
    program = trace(build, nn.functional.mse_loss, batch())
    verify(program, build, nn.functional.mse_loss, program.feed(batch()), seed=3, folder=tmp_path)
    weights, again = 4, 8  # of the model and the program; and their gradients, when the forward pass is repeated
    assert [int(line) for line in record.read_text().splitlines()][-2:] == [weights, again]
    gc.collect()
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 0
