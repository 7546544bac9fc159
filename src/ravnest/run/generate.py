"""Generates tokens with the model of a run that nobody has whole.

While the run trains, its stages predict: each token is one prompt through a cluster, between two microbatches, on the
weights of its next step. Later the weights are read from the newest checkpoint or the final model as the operations
need them, from memory-mapped files; the system keeps as much of them in memory as it can spare.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from ravnest.errors import WeightsError
from ravnest.graph import Interpreter, Program, split
from ravnest.graph.prediction import PromptEncoder, best_tokens, prediction_stage
from ravnest.graph.weights import WeightsFile, open_weights, replay
from ravnest.run.checkpoint.export import newest_weights
from ravnest.run.job import Job

__all__ = ["Candidates", "CheckpointPredictor", "Predict", "generate_tokens"]

Candidates = tuple[Sequence[int], Sequence[float | None]]  # tokens, the most probable first, and their scores
Predict = Callable[[Sequence[int]], Candidates]


class CheckpointPredictor:
    """Predicts with the weights of a run's directory. Use it as a context: it holds files open."""

    def __init__(self, run: Path, job: Job) -> None:
        self.source = newest_weights(run)
        program = job.workload().program
        self._encoder = PromptEncoder(program)
        (stage,) = split(program, [])
        self._interpreter = Interpreter(prediction_stage(stage))
        self._state: Mapping[str, Tensor] = {}
        self._program, self._seed = program, job.config.seed
        self._files = contextlib.ExitStack()

    def __enter__(self) -> Self:
        needed = self._interpreter.stage.state
        places = self.source.places
        files: dict[Path, WeightsFile] = {
            path: self._files.enter_context(open_weights(path)) for path in {path for path, _ in places.values()}
        }
        state: dict[str, Tensor] = {}
        for item in needed:
            if item.target in places:
                path, name = places[item.target]
                dtype, shape = files[path].spec_of(name)
                if (dtype, shape) != (item.dtype, item.shape):
                    raise WeightsError(
                        f"{item.target} is {dtype} {list(shape)} in {path}, the job's model has {item.dtype} "
                        f"{list(item.shape)}: is it the job of this run?"
                    )
                state[item.target] = files[path].read(name)
            elif item.kind == "parameter":
                raise WeightsError(f"the weights of the run have no {item.target}: is it the job of this run?")
        self._state = {**_made(self._program, {s.target for s in needed} - state.keys(), self._seed), **state}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.close()

    def __call__(self, tokens: Sequence[int]) -> Candidates:
        inputs, position = self._encoder(tokens)
        with torch.no_grad():
            (prediction,) = self._interpreter(self._state, inputs, training=False)
        best, scores = best_tokens(prediction, [position])
        return best[0], scores[0]


def _made(program: Program, targets: set[str], seed: int) -> dict[str, Tensor]:
    """Buffers that are not saved with a model, as the model itself makes them."""
    if program.init_log is None:
        return {target: program.tensors[target].detach() for target in targets}
    return replay(program.init_log.init_for({t: program.tensors[t] for t in targets}), targets, seed)


def generate_tokens(
    predict: Predict,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Generate up to `count` tokens after a prompt.

    Args:
        predict: Returns the most probable tokens after a sequence, and their scores.
        prompt: The token ids to start with.
        count: The number of tokens.
        temperature: 0 takes the most probable token; higher values draw less probable ones more often.
        seed: Of the random draws.
        stop: A token that ends the sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        candidates, scores = predict(tokens)
        finite = [(token, score) for token, score in zip(candidates, scores, strict=True) if score is not None]
        if not finite:
            raise ValueError("the model's scores are not finite: its weights are damaged")
        index = 0
        if temperature > 0:
            chances = (torch.tensor([score for _, score in finite]) / temperature).softmax(0)
            index = int(torch.multinomial(chances, 1, generator=generator))
        tokens.append(finite[index][0])
        yield tokens[-1]
        if tokens[-1] == stop:
            return
