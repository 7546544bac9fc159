"""Bad input of a user: one sentence that says what to change, before any worker starts."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ravnest
from ravnest.config import TrainingConfig
from ravnest.run.checkpoint.export import job_of
from ravnest.run.job import Job, new_folder
from ravnest.run.job_file import load_job
from ravnest.run.metrics import ProgressView
from ravnest.run.model_check import check_model, progress_messages

RunCli = Callable[..., tuple[int, str, str]]

HEAD = """
import torch, ravnest
from torch import nn
torch.manual_seed(0)
data = [(torch.randn(4, 3), torch.randn(4, 2))] * 3
model = nn.Linear(3, 2)
"""
JOB = "job = ravnest.Job(model=model, loss=nn.functional.mse_loss, data=data)\n"

# by name: the file, the exit code, and the message
FILES: dict[str, tuple[str, int, str]] = {
    "raises": (
        HEAD + "def table(key):\n    return {}[key]\nsize = table('width')\n" + JOB,
        1,
        r"job\.py\", line 9[\s\S]*in table[\s\S]*ravnest: KeyError: 'width'$",
    ),
    "exits": (HEAD + "import sys; sys.exit('no data')\n" + JOB, 2, r"ended with sys\.exit\('no data'\) while it was"),
    "arguments": (
        HEAD + "import argparse\np = argparse.ArgumentParser()\np.add_argument('corpus')\np.parse_args()\n" + JOB,
        2,
        "arguments for argparse need a default, or follow --",
    ),
    "relative import": ("from . import helpers\n", 2, "uses a relative import.* write 'import helpers'"),
    "missing module": ("import not_there_at_all\n", 1, "ModuleNotFoundError: No module named 'not_there_at_all'"),
    "guarded": (HEAD + f"if __name__ == '__main__':\n    {JOB}", 2, "behind if __name__ == '__main__' does not run"),
    "function": (HEAD + "def job():\n    pass\n", 2, "its 'job' is a function"),
    "two jobs": (HEAD + JOB + "job = [job, job]\n", 2, "its 'job' is a list, not one job"),
    "asks": (HEAD + "name = input('dataset? ')\n" + JOB, 2, "asks for input, and there is none"),
    "binary": ("\udcff\udcfe", 2, "not valid Python|not a text file"),
    "builder asks": (
        HEAD + JOB + "job.model = lambda: nn.Linear(3, int(input()))\n",
        2,
        "the builder failed.*EOFError",
    ),
    "builder exits": (
        HEAD + JOB + "import sys\ndef build():\n    sys.exit(3)\njob.model = build\n",
        1,
        r"in build[\s\S]*called sys\.exit\(3\): leave that out",
    ),
    "data raise at once": (
        HEAD + "def rows():\n    yield {}['x']\n" + JOB + "job.data = rows()\n",
        1,
        r"in rows[\s\S]*KeyError: 'x'\. The data raised this after 0 batches",
    ),
    "two models": (HEAD + JOB + "job.model = [model, model]\n", 2, "a job trains one model"),
    "weight": (
        HEAD + JOB + "job.weight = lambda batch: torch.ones(3)\n",
        2,
        r"must return a tensor of shape \(4,\).* got shape \(3,\)",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_job_file(name: str, run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, expected, message = FILES[name]
    (tmp_path / "job.py").write_text(text, errors="surrogateescape")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, output, errors = run_cli("train", "job.py", "--steps", "2")
    assert re.search(message, errors.strip()), errors
    assert code == expected
    assert "Traceback" not in errors + output
    assert not list(tmp_path.glob("runs/*")), "something was started"


def test_a_job_file_with_arguments_that_have_defaults(tmp_path: Path) -> None:
    parser = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', default=0.5)\na = p.parse_args()\n"
    (tmp_path / "job.py").write_text(HEAD + parser + "print('loading')\n" + JOB + "job.name = str(a.lr)\n")
    assert load_job(tmp_path / "job.py").job.name == "0.5"
    assert load_job(tmp_path / "job.py", ["--lr", "2"]).job.name == "2"
    (tmp_path / "job.txt").write_text(f'{tmp_path / "job.py"}\n["--lr", "3"]\n')
    assert job_of(tmp_path, None, "").name == "3", "as `ravnest export` finds it"


def test_a_job_file_gets_the_arguments_after_two_dashes(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys\nraise ValueError(sys.argv[1:])\n")
    for options, expected in ((["--local", "2"], "[]"), (["--", "--local", "x"], "['--local', 'x']")):
        code, _, errors = run_cli("train", tmp_path / "job.py", *options)
        assert (code, f"ValueError: {expected}" in errors) == (1, True), errors
    code, _, errors = run_cli("train", tmp_path / "job.py", "stray")
    assert code == 2
    assert "arguments of the job file go after --" in " ".join(errors.split())


def linear(**changes: Any) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for name, value in changes.items():
            getattr(model, name)[0] = value
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (linear(weight=float("nan")), "the parameter weight of the model has values that are infinite or NaN"),
        (linear(bias=float("inf")), "the parameter bias"),
        (nn.Linear(3, 2, device="meta"), "weight of the model is on the meta device"),
        ({"a": linear()}, "the model is a dict, and a job trains one model"),
        ((linear(), linear()), "put several into one"),
    ],
)
def test_a_bad_model(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(model)


def test_models_that_are_fine() -> None:
    masked = nn.Linear(3, 2)
    masked.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    for model in (masked, nn.LazyLinear(3), lambda: linear(weight=float("nan"))):
        check_model(model)


def train(tmp_path: Path, **changes: Any) -> None:
    given: dict[str, Any] = {"model": linear(), "loss": F.mse_loss, "data": [(torch.ones(4, 3), torch.ones(4, 2))]}
    given |= changes
    config = TrainingConfig(steps=2, run_dir=tmp_path / "run", on="local:1", **given.pop("config", {}))
    Job(**given).train(config)


def forever() -> Any:
    while True:
        yield torch.ones(4, 3), torch.ones(4, 2)


class Single(nn.Linear):
    """Treats a batch of one sample in another way."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result * 2 if x.shape[0] == 1 else result


class Selects(nn.Linear):
    """Has an output whose size is a number of values."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x[x > 0] if (x > 0).sum() > 1 else x


class Nonzero(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).nonzero().float().sum(1)


X, Y = torch.ones(4, 3), torch.ones(4, 2)
JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "vector": ({"loss": lambda y, t: (y - t).square()}, "must be a scalar"),
    "number": ({"loss": lambda y, t: 3.0}, "the loss is a float, not a tensor"),
    "item": ({"loss": lambda y, t: F.mse_loss(y, t).item()}, r"without \.item\(\)"),
    "float": ({"loss": lambda y, t: float(F.mse_loss(y, t))}, r"without \.item\(\)"),
    "detached": ({"loss": lambda y, t: F.mse_loss(y.detach(), t)}, "does not depend on any trainable parameter"),
    "frozen": ({"model": linear().requires_grad_(False)}, "does not depend on any trainable parameter"),
    "not a number": ({"loss": lambda y, t: (y.sum() - 1e9).log()}, "the loss of the first batch is nan"),
    "infinite": ({"loss": lambda y, t: F.mse_loss(y, t) * 1e38 * 1e38}, "the loss of the first batch is inf"),
    "a shape from values": (
        {"loss": lambda y, t: y.sum(), "model": Selects()},
        r"depends on the values of its tensors, at .*test_bad_input\.py:\d+ in forward: return x\[x > 0\]",
    ),
    "a shape from values in the loss": (
        {"model": Nonzero(), "loss": F.mse_loss},
        "depends on the values of its tensors, in an operation of torch that the loss calls",
    ),
    "integers": ({"loss": lambda y, t: y.argmax()}, "must be a scalar"),
    "empty": ({"data": []}, "the data are empty"),
    "no iterable": ({"data": 3}, "the data are a int, which cannot be iterated"),
    "a function": ({"data": forever}, "call it, and pass what it returns"),
    "a dataset": ({"data": torch.utils.data.TensorDataset(X, Y)}, "gives samples one by one: pass .*DataLoader"),
    "endless": ({"data": forever(), "config": {"epochs": 2}}, "epochs is 2, but the data are a generator"),
    "lengths": ({"data": [(X, Y), (torch.ones(4, 5), Y)]}, "different lengths.*max_length"),
    "batch size": ({"config": {"max_batch_size": 3}}, "a batch has 4 samples, max_batch_size is 3"),
    "held-out": ({"validation": [(X, torch.ones(4, 9))]}, "the held-out data do not match the data: batch.targets"),
    "other for one sample": (
        {"model": Single(), "data": [(X, Y), (X[:1], Y[:1])]},
        "a batch of 1 samples, split into microbatches of 1, cannot be trained: the traced program does not train",
    ),
    "batch norm of one sample": (
        {"model": nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), "data": [(X, Y), (X[:1], Y[:1])]},
        "cannot be trained: .*more than 1 value per channel.*drop_last",
    ),
    "no samples": ({"data": [(X[:0], Y[:0])]}, "at least one sample|no samples"),
    "a scalar batch": ({"data": [(torch.tensor(1.0), torch.tensor(1.0))]}, "no tensor with a batch dimension"),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_bad_job(name: str, tmp_path: Path) -> None:
    changes, message = JOBS[name]
    with pytest.raises((ValueError, ravnest.RavnestError), match=message):
        train(tmp_path, **changes)
    assert not list((tmp_path / "run").glob("*")) if (tmp_path / "run").exists() else True


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the directory of the run cannot be made: [^\[]*: \w[^\[]*; choose another"):
        new_folder(tmp_path / "file" / "run", "run")


def test_long_work_shows_its_time() -> None:
    shown: list[str] = []
    is_long = threading.Event()

    class View(ProgressView):
        def message(self, text: str) -> None:
            shown.append(text)
            if len(shown) == 2:
                is_long.set()

    with progress_messages(View(), "building the model", every_s=0.01):
        assert is_long.wait(60)
    assert [text.split(", ")[0] for text in shown[:2]] == ["building the model"] * 2
    count = len(shown)
    with progress_messages(View(), "a moment", every_s=60):
        pass
    assert len(shown) == count


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [
        (None, "got None"),
        ("adam", "got 'adam'"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), r"got a torch\.optim\.sgd\.SGD"),
    ],
    ids=["none", "name", "torch"],
)
def test_an_optimizer_of_another_library_is_refused(optimizer: Any, given: str, tmp_path: Path) -> None:
    job = Job(nn.Linear(3, 2), F.mse_loss, [(torch.ones(4, 3), torch.ones(4, 2))], optimizer)
    with pytest.raises(ValueError, match=rf"optimizer must be one of Ravnest's, such as ravnest\.AdamW.*{given}"):
        job.train(run_dir=tmp_path / "run", on="local:1")
