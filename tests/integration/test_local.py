"""Training on this machine, with real processes, as a user does it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ravnest
from ravnest.config import TrainingConfig
from ravnest.coordinator.journal import replay
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
from ravnest.examples.text import batches, library_text
from ravnest.run.job import Job, Run
from ravnest.run.result import read_model

pytestmark = pytest.mark.slow

CONFIG = GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2, dropout=0.1, tied=True)


class Text:
    def __init__(self, seed: int, size: int = 12) -> None:
        self.seed, self.size = seed, size

    def __iter__(self) -> Iterator[Any]:
        return batches(library_text(100_000), self.size, CONFIG.context, self.seed)


def job(**changes: Any) -> Job:
    given: dict[str, Any] = {
        "model": lambda: GPT(CONFIG), "loss": next_token_loss, "data": Text(0), "validation": Text(1),
        "optimizer": ravnest.AdamW(3e-3, clip_norm=1.0), **changes,
    }  # fmt: skip
    return Job(**given)


def workers_left() -> list[int]:
    """Worker processes that this process started and that are still there; their server stays for the next run."""
    return [p.pid for server in psutil.Process().children() for p in server.children()]


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    before = set(workers_left())
    yield
    assert set(workers_left()) <= before


def train(tmp_path: Path, name: str = "run", made: Job | None = None, **changes: Any) -> Run:
    options = {"steps": 6, "on": "local:3", "threads": 1, "validation_batches": 2, **changes}
    return (made or job()).train(TrainingConfig(run_dir=tmp_path / name, **options))


def test_a_run_trains_and_leaves_what_it_promises(tmp_path: Path) -> None:
    run = train(tmp_path, steps=40, validate_every=20)
    assert run.losses[-1] < run.losses[0] - 1.0
    assert [e["step"] for e in run.evaluations] == [20, 40]
    assert {p.name for p in run.folder.iterdir()} == {
        "model.safetensors", "metrics.jsonl", "plan.json", "node-0.log", "node-1.log", "node-2.log", "coordinator",
        "coordinator.txt", "dashboard.json",
    }  # fmt: skip
    model = GPT(CONFIG)
    model.load_state_dict(run.state_dict())
    with torch.no_grad():
        loss = next_token_loss(model.eval()(next(iter(Text(1)))[0]), next(iter(Text(1)))[1])
    assert loss < run.losses[0] - 1.0
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(1, 41))
    plan = json.loads((run.folder / "plan.json").read_text())
    assert [stage["node"] for stage in plan["clusters"]["c1"]["stages"]] == ["node-0", "node-1", "node-2"]
    assert all(max(m.staleness) == 1 and m.versions <= 2 for m in run.stages.values())


@pytest.mark.usefixtures("fixed_times")
def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    """Dropout, clipping and tied weights included; another number of nodes sums in another order, no more."""
    first, again, other = (
        train(tmp_path, name, seed=seed, on="local:2") for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert first.losses == again.losses != other.losses
    weights, repeated = first.state_dict(), again.state_dict()
    assert all(torch.equal(t, repeated[n]) for n, t in weights.items())


def test_sync_mode_is_plain_pytorch(tmp_path: Path) -> None:
    config = GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2, dropout=0.0)
    torch.manual_seed(5)
    model = GPT(config)
    start = {n: t.clone() for n, t in model.state_dict().items()}
    run = train(
        tmp_path,
        made=job(model=model, optimizer=ravnest.AdamW(3e-3)),
        mode="sync",
        microbatches_per_step=2,
        on="local:2",
    )
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in start.items()), "the user's model was changed"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for (x, y), _ in zip(Text(0), range(6), strict=False):
        optimizer.zero_grad()
        for xs, ys in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            (next_token_loss(model(xs), ys) * 0.5).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    trained = run.state_dict()
    assert [n for n, t in model.state_dict().items() if not torch.equal(t, trained[n])] == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"microbatches_per_step": 1}, marks=pytest.mark.soak),
        {"microbatches_per_step": 1, "max_staleness": 1},
        pytest.param({"microbatch": 5}, marks=pytest.mark.soak),
        {"activation_compression": "int8"},
        pytest.param({"on": "local:1"}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_other_ways_to_train(changes: dict[str, Any], tmp_path: Path) -> None:
    run = train(tmp_path, **{"steps": 12, "on": "local:2", **changes})
    assert run.losses[-1] < run.losses[0]
    if "max_staleness" in changes:
        assert max(max(m.staleness) for m in run.stages.values()) <= 1


def test_data_that_end_end_the_run(tmp_path: Path) -> None:
    data = [batch for batch, _ in zip(Text(0), range(4), strict=False)]
    assert len(train(tmp_path, "iterator", job(data=iter(data)), steps=None, on="local:1").losses) == 4
    assert len(train(tmp_path, "epochs", job(data=data), steps=None, epochs=2, on="local:1").losses) == 8
    assert len(train(tmp_path, "again", job(data=data), steps=6, on="local:2").losses) == 6


def test_what_was_trained_before_a_bad_batch_is_saved(tmp_path: Path) -> None:
    data = [batch for batch, _ in zip(Text(0), range(9), strict=False)]  # more than are read ahead
    with pytest.raises(ValueError, match="has shape") as refused:
        train(tmp_path, made=job(data=[*data, (torch.zeros(12, 5, dtype=torch.int64),) * 2]), on="local:2", steps=20)
    assert "The model after the 9 steps before the error is in" in refused.value.__notes__[0]
    assert load_file(tmp_path / "run" / "model.safetensors")


def test_a_last_batch_with_fewer_samples_than_microbatches(tmp_path: Path) -> None:
    """It is filled up with microbatches that weigh nothing: the same as a plain step on what there is."""
    config = GPTConfig(vocab=256, context=16, layers=1, width=32, heads=2, dropout=0.0)
    torch.manual_seed(5)
    model = GPT(config)
    (x, y), (small, target) = next(iter(Text(0))), next(iter(Text(3, size=2)))
    made = job(model=model, optimizer=ravnest.SGD(0.1), data=[(x, y), (small, target)])
    run = train(tmp_path, made=made, mode="sync", microbatches_per_step=4, on="local:2", steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in ((x, y), (small, target)):
        optimizer.zero_grad()
        next_token_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    trained = run.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.soak
def test_ctrl_c_in_an_evaluation_saves_too(tmp_path: Path) -> None:
    text = COMMAND + "job.validation = batches(library_text(50_000), 8, 16, 1)"
    running = start(
        tmp_path, "--local", "2", "--steps", "100000", "--validate-every", "1", "--validation-batches", "1", text=text
    )
    wait_for(lambda: steps_done(tmp_path) > 3, "training")
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert "held-out" in output
    assert load_file(tmp_path / "run" / "model.safetensors")


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    class Poisoned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)[:, 0]  # type: ignore[no-any-return]

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 4, generator=generator), torch.ones(8)) for _ in range(6)]
    data[3][0][2, 1] = float("nan")
    made = Job(Poisoned, nn.functional.mse_loss, data, optimizer=ravnest.SGD(0.1), validation=data[:2])
    with pytest.raises(ravnest.NotFinite, match=r"in step 4, batch 3: the weights before that step are in"):
        train(tmp_path, made=made, on="local:2", validate_every=1)
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in kept.values()), "running statistics included"


COMMAND = """
import ravnest, torch
from ravnest.examples.text import Bytes, batches, library_text
from ravnest.examples.gpt import GPT, GPTConfig, next_token_loss
config = GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2)
job = ravnest.Job(model=lambda: GPT(config), loss=next_token_loss, data=batches(library_text(50_000), 8, 16, 0),
                  tokenizer=Bytes())
"""


SLOWLY = """
import time
fast = job.data
job.data = (batch for batch in fast if not time.sleep(0.1))  # other commands need the processor meanwhile
"""


def start(tmp_path: Path, *args: str, text: str = COMMAND) -> subprocess.Popen[str]:
    (tmp_path / "job.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "ravnest",
        "train",
        str(tmp_path / "job.py"),
        "--run-dir",
        str(tmp_path / "run"),
        *args,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)


def wait_for(found: Callable[[], Any], what: str) -> Any:
    """Look until something is there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if result := found():
            return result
        time.sleep(0.05)  # nothing tells us when another process has got somewhere
    raise AssertionError(f"{what} did not happen")


def children(parent: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers of a run and the process that forks them."""
    found: list[psutil.Process] = psutil.Process(parent.pid).children(recursive=True)
    return found


def steps_done(tmp_path: Path) -> int:
    path = tmp_path / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_clusters_average(tmp_path: Path) -> None:
    run = train(tmp_path, steps=200, on="local:4", clusters=2, average_every=36)
    assert run.losses[-1] < run.losses[0] - 0.5
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["cluster"] for line in lines if "step" in line} == {"c1a", "c1b"}
    assert any("round" in line for line in lines), "rounds of averaging"
    links = replay(run.folder / "coordinator" / "journal")[0].clusters["c1a"].links
    assert {link.kind for link in links.values()} >= {"unix", "memory"}
    assert run.steps == 200
    assert sorted(run.contributions) == ["node-0", "node-1", "node-2", "node-3"], "those of both clusters"
    samples = sum(line["samples"] for line in lines if "step" in line)
    assert sum(node.work for node in run.contributions.values()) == pytest.approx(samples)


def ravnest_command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ravnest", *args], capture_output=True, text=True, timeout=90)


def test_status_generate_and_ctrl_c(tmp_path: Path) -> None:
    running = start(tmp_path, "--local", "2", "--steps", "100000", text=COMMAND + SLOWLY)
    wait_for(lambda: steps_done(tmp_path) > 3, "training")
    workers = children(running)
    folder = str(tmp_path / "run")
    shown = ravnest_command("status", folder, "--json")
    during = ravnest_command("generate", folder, "--ids", "--prompt", "100,101,102", "--tokens", "3")
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=60)
    assert shown.returncode == 0, shown.stderr
    status = json.loads(shown.stdout)
    assert [node["name"] for node in status["nodes"]] == ["node-0", "node-1"]
    assert [stage["name"] for stage in status["clusters"][0]["stages"]] == ["node-0", "node-1"]
    assert running.returncode == 0, errors
    assert "the run is in" in output
    assert load_file(tmp_path / "run" / "model.safetensors")
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
    assert not any(p.is_running() for p in workers)
    after = ravnest_command("status", folder, "--json")
    assert after.returncode == 2
    assert "is not running" in after.stderr
    assert during.returncode == 0, during.stderr
    assert re.fullmatch(r"100,101,102(,\d+){3}\n", during.stdout)
    made = ravnest_command("generate", folder, "--prompt", "def ", "--tokens", "20")
    assert made.returncode == 0, made.stderr
    assert made.stdout == f"{greedy_text(tmp_path / 'run', 'def ', 20)}\n"


def greedy_text(run: Path, prompt: str, count: int) -> str:
    """What the final model itself writes."""
    model = GPT(GPTConfig(vocab=256, context=16, layers=2, width=32, heads=2)).eval()
    model.load_state_dict(read_model(run / "model.safetensors"))
    ids = torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids[:, -16:])[:, -1].argmax(1, keepdim=True)], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def test_workers_leave_when_their_parent_is_killed(tmp_path: Path) -> None:
    running = start(tmp_path, "--local", "2", "--steps", "100000")
    wait_for(lambda: steps_done(tmp_path) > 3, "training")
    workers = children(running)
    running.kill()
    running.communicate()
    assert not psutil.wait_procs(workers, timeout=10)[1], "still there"


BAD_JOBS = {
    "no file": (None, [], "does not exist or is not a file"),
    "no job": ("x = 1", [], "it defines no 'job'"),
    "another thing": ("job = 3", [], "its 'job' is a int"),
    "syntax": ("job = (", [], "not valid Python"),
    "too many nodes": (COMMAND, ["--local", "5000"], "more nodes|can be cut|nodes"),
    "too little memory": (COMMAND, ["--local", "2", "--memory", "1MB"], "memory|fit"),
    "sizes": (COMMAND, ["--local", "3", "--memory", "1GB,2GB"], "3 nodes need as many memory sizes"),
    "growing batches": (
        COMMAND + "job.data = [(torch.zeros(n, 16, dtype=torch.int64),) * 2 for n in (4, 4, 40)]",
        ["--max-batch-size", "10"],
        "a batch has 40 samples, max_batch_size is 10",
    ),
    "mode": (COMMAND, ["--mode", "fast"], "async, sync"),
    "compression": (COMMAND, ["--activation-compression", "zip"], "none, bf16, int8"),
    "vector loss": (COMMAND + "job.loss = lambda y, t: y.mean(2)", [], "must be a scalar"),
    "untraceable": (
        COMMAND + "job.loss = lambda y, t: y.mean() if y.sum() > 0 else y.sum()",
        [],
        "depends on the values",
    ),
    "a sum over the batch": (
        COMMAND + "loss = job.loss\njob.loss = lambda y, t: loss(y, t) * y.shape[0]",
        [],
        "the loss depends on the batch as a whole: .*microbatches_per_step=1",
    ),
    "random backward": (
        COMMAND
        + """
class Round(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.round())
    backward = staticmethod(lambda ctx, g: g + torch.rand_like(g))
loss = job.loss
job.loss = lambda y, t: loss(Round.apply(y * 4), t)
""",
        [],
        "does not train as the model does: .*the autograd function Round",
    ),
    "empty data": (COMMAND + "job.data = []", [], "the data are empty"),
    "worker fails": (
        COMMAND + "job.data = [(torch.full((8, 16), 999),) * 2]",
        ["--local", "2", "--no-verify"],
        r"node-0 failed: IndexError: index out of range.* the logs are in",
    ),
    "model fails": (
        COMMAND + "job.data = [(torch.full((8, 16), 999),) * 2]",
        [],
        r"the model's forward pass fails on one of the first batches: IndexError: index out of range",
    ),
    "changing shapes": (
        COMMAND + "job.data = [(torch.zeros(8, n, dtype=torch.int64),) * 2 for n in (16, 15)]",
        [],
        "the batches have different lengths: dimension 1 of batch.inputs varies from 15 to 16",
    ),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_bad_job_is_one_sentence(
    name: str, run_cli: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, args, message = BAD_JOBS[name]
    if text is not None:
        (tmp_path / "job.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    code, output, errors = run_cli("train", "job.py", "--steps", "4", *args)
    assert code == 2, output + errors
    assert re.search(message, errors), errors
