"""`ravnest demo`: a small GPT learns Python from the standard library's source, in stages that are data.

The model is traced, cut into stages of alike cost, each stage written to JSON and read back as a stranger would
read it, and trained with weights it made itself. For now the stages take turns in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from .core.config import format_bytes
from .examples.gpt import GPT, GPTConfig, next_token_loss
from .examples.text import batches, decode, library_text
from .graph import Costs, Program, Runner, Stage, Tape, dump, initialise, legal_cuts, load, measure_costs, split, trace
from .graph.program import num_bytes

__all__ = ["run_demo"]

CONFIG = GPTConfig(vocab=256, context=64, layers=4, width=128, heads=4, dropout=0.0)
BATCH = 16


@dataclass
class _Worker:
    """A stage with its weights and optimizer."""

    stage: Stage
    runner: Runner
    state: dict[str, Tensor]
    optimizer: torch.optim.Optimizer


def run_demo(console: Console, *, steps: int, num_stages: int, seed: int) -> None:
    text = library_text()
    train, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    data = batches(train, BATCH, CONFIG.context, seed)
    program = trace(lambda: GPT(CONFIG), next_token_loss, next(data))
    costs = measure_costs(program, BATCH)
    files = [dump(stage) for stage in split(program, even_cuts(costs, legal_cuts(program), num_stages))]
    workers = [_worker(file, seed) for file in files]
    console.print(_table(program, workers, files))
    with _progress(console) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))
        for _ in range(steps):
            progress.update(task, advance=1, loss=_step(workers, next(data)))
    validation = (
        sum(_loss(workers, batch) for _, batch in zip(range(8), batches(held_out, BATCH, 64, 1), strict=False)) / 8
    )
    console.print(f"validation loss {validation:.3f} per byte (untrained: {torch.log(torch.tensor(256.0)):.3f})")
    console.print("a sample of what it writes:", style="bold")
    console.print(_sample(workers, "def ", 200), markup=False, highlight=False)


def _progress(console: Console) -> Progress:
    columns = ("{task.description}", BarColumn(), "{task.completed}/{task.total}", "loss {task.fields[loss]:.3f}")
    return Progress(*columns, TimeRemainingColumn(), console=console)


def even_cuts(costs: Costs, legal: Sequence[int], num_stages: int) -> list[int]:
    """Cuts that give each stage about the same FLOPs; of places that are alike, the one with fewest bytes."""
    total = costs.flops(0, len(costs.ops))
    cuts: list[int] = []
    for k in range(1, num_stages):
        near = [c for c in legal if abs(costs.flops(0, c) / total - k / num_stages) < 0.25 / num_stages]
        near = [c for c in near if not cuts or c > cuts[-1]] or [c for c in legal if not cuts or c > cuts[-1]]
        if not near:
            raise ValueError(f"{num_stages} stages are more than this model can be cut into")
        cuts.append(
            min(near, key=lambda c: (costs.cuts[c].forward_bytes, abs(costs.flops(0, c) / total - k / num_stages)))
        )
    return cuts


def _worker(file: bytes, seed: int) -> _Worker:
    stage = load(file)
    state = initialise(stage, seed)
    for item in stage.parameters:
        state[item.target].requires_grad_(item.trainable)
    trained = [state[item.target] for item in stage.parameters if item.trainable]
    return _Worker(stage, Runner(stage), state, torch.optim.AdamW(trained, lr=2e-3))


def _step(workers: Sequence[_Worker], batch: tuple[Tensor, Tensor]) -> float:
    tapes: list[Tape] = []
    values: Sequence[object] = batch
    for worker in workers:
        tapes.append(Tape(worker.runner, worker.state, values))
        values = tapes[-1].outputs
    gradients = None
    for worker, tape in zip(reversed(workers), reversed(tapes), strict=True):
        gradients = tape.backward(gradients)
        worker.optimizer.step()
        worker.optimizer.zero_grad()
    return float(tapes[-1].outputs[0])


def _loss(workers: Sequence[_Worker], batch: tuple[Tensor, Tensor]) -> float:
    values: tuple[object, ...] = batch
    with torch.no_grad():
        for worker in workers:
            values = worker.runner(worker.state, values, training=False)
    return float(values[0])  # type: ignore[arg-type]


def _sample(workers: Sequence[_Worker], prompt: str, length: int) -> str:
    """Text from the trained weights, written by the model itself."""
    model = GPT(CONFIG).eval()
    model.load_state_dict({n: t for worker in workers for n, t in worker.state.items()})
    ids = torch.tensor([list(prompt.encode())])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(length):
            logits = model(ids[:, -CONFIG.context :])[0, -1]
            ids = torch.cat([ids, torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)[None]], 1)
    return decode(ids[0])


def _table(program: Program, workers: Sequence[_Worker], files: Sequence[bytes]) -> Table:
    table = Table(title=f"a GPT of {program.num_parameters:,} parameters in {len(workers)} stages")
    for name in ("stage", "ops", "parameters", "file", "sends a batch"):
        table.add_column(name, justify="right")
    for worker, file in zip(workers, files, strict=True):
        own = [s for s in worker.stage.parameters if s.owner == worker.stage.index]
        sent = sum(num_bytes(v, BATCH) for v in worker.stage.outputs)
        table.add_row(
            str(worker.stage.index), str(len(worker.stage.ops)), format_bytes(sum(s.num_bytes for s in own)),
            format_bytes(len(file)), format_bytes(sent),
        )  # fmt: skip
    return table
